"""The ranks of a strategy: as many as were launched, wherever Lightning counts devices and nodes."""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info

from lightning_distrec.cluster.consensus import CONTINUE, consensus_of_all_ranks
from lightning_distrec.cluster.environment import LaunchedRanks, check_numbers
from lightning_distrec.cluster.interface import GLOO, choose_interface
from lightning_distrec.cluster.launched import Launched
from lightning_distrec.cluster.rendezvous import MeetingPoint, meet
from lightning_distrec.cluster.threads import cpus_of_this_process, num_threads, use_threads
from lightning_distrec.strategies.run.watchdog import start_watchdog, watched
from lightning_distrec.units import quantity


def launched_of(environment: ClusterEnvironment | None) -> Launched | None:
    """Return the ranks as the launcher describes them; None under Lightning's launcher, or the user's plugin."""
    return environment.launched if isinstance(environment, LaunchedRanks) else None


def check_launch(strategy: DDPStrategy, num_nodes: int) -> None:
    """Raise ConfigError where as many ranks were not launched as Trainer(devices, num_nodes) asks for."""
    if (launched := launched_of(strategy.cluster_environment)) is not None:
        devices: Any = strategy.parallel_devices
        available = strategy.accelerator.auto_device_count()  # type: ignore[union-attr]
        check_numbers(launched, len(devices), available, num_nodes)


def wrap_launch(launcher: Any, before_fit: Callable[[Trainer], None], timeout_seconds: float) -> None:
    """Let a strategy's launcher call `before_fit` before every fit, and watch over every run that it launches."""
    launch = launcher.launch

    def all_stop() -> bool:
        return dist.is_initialized() and consensus_of_all_ranks(timeout_seconds)[0].flags.agreed != CONTINUE

    @functools.wraps(launch)
    def prepare_and_launch(function: Any, *args: Any, trainer: Any = None, **options: Any) -> Any:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            before_fit(trainer)
        with watched(trainer, all_stop):
            return launch(function, *args, trainer=trainer, **options)

    # On the instance: Lightning calls strategy.launcher.launch before any hook of the strategy.
    launcher.launch = prepare_and_launch


def connect_ranks(
    strategy: DDPStrategy, backend: str, timeout: timedelta, watchdog_seconds: float, sets_threads: bool
) -> None:
    """Collective. Meet the other ranks, make the default process group and start the watchdog.

    sets_threads: whether torch's number of threads follows the CPUs that the launcher gives each rank.
    Raises RendezvousError: not all ranks arrive within the timeout.
    """
    rank, num_ranks, num_nodes = strategy.global_rank, strategy.world_size, strategy.num_nodes
    environment: Any = strategy.cluster_environment
    launched, device = launched_of(environment), strategy.root_device
    nodes = launched.nodes if launched else ()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    point = _meeting_point(environment)

    def log_on_rank(message: str) -> None:
        print(rank_prefixed_message(message, rank), flush=True)

    store = meet(point, rank, num_ranks, timeout.total_seconds(), log_on_rank, nodes)
    if num_nodes > 1:
        os.environ |= choose_interface(store, rank, num_ranks, point.host, backend, os.environ)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if num_ranks > 1:
        start_watchdog(rank, point.host, store, watchdog_seconds, nodes)
    if sets_threads:
        consensus, _ = consensus_of_all_ranks(timeout.total_seconds())
        cpus_of_ranks = consensus.all_gather(cpus_of_this_process(strategy.node_rank))
        use_threads(num_threads(cpus_of_ranks, rank, os.environ))
    launcher = launched.by if launched else type(environment).__name__.removesuffix("Environment")
    over = f" over {os.environ[GLOO]}" if num_nodes > 1 and os.environ.get(GLOO) else ""
    rank_zero_info(
        f"{quantity(num_ranks, 'rank')} on {quantity(num_nodes, 'node')}, started by {launcher}, exchange by "
        f"{backend}{over}."
    )


def _meeting_point(environment: ClusterEnvironment) -> MeetingPoint:
    if isinstance(environment, LaunchedRanks):
        return environment.launched.point
    return MeetingPoint(environment.main_address, (environment.main_port,), type(environment).__name__)
