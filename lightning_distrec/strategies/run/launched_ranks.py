"""The ranks of a strategy: as many as were launched, wherever Lightning counts devices and nodes."""

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info

from lightning_distrec._compat.lightning_checkpoints import upload_folders_too
from lightning_distrec.checkpoint.save import wait_for_checkpoint
from lightning_distrec.cluster.consensus import CONTINUE, job_consensus
from lightning_distrec.cluster.environment import LaunchedRanks, check_numbers
from lightning_distrec.cluster.interface import GLOO, choose_interface
from lightning_distrec.cluster.job_key import VARIABLE
from lightning_distrec.cluster.launched import Launched
from lightning_distrec.cluster.rendezvous import MeetingPoint, meet
from lightning_distrec.cluster.threads import cpus_of_this_process, num_threads, use_threads
from lightning_distrec.errors import ConfigError
from lightning_distrec.gpu import device_id, refuse_shared_devices
from lightning_distrec.namespaces import refuse_other_namespace
from lightning_distrec.strategies.run.forked_ranks import (
    LAUNCHER_PID,
    check_fork,
    fork_ranks,
    forks_ranks,
    is_forked,
    restored_variables,
)
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


def wrap_launch(strategy: Any, before_fit: Callable[[Trainer], ExitStack], timeout_seconds: float) -> None:
    """Let a strategy's launcher call `before_fit` before every fit, and watch over every run that it launches.

    What `before_fit` patches, and that loggers upload our folders, lasts for the run.

    Lightning's own launcher, on one node, passes the ranks that it starts a key of their job.
    """
    # On the instance: Lightning calls strategy.launcher.launch before any hook of the strategy. Of a function of this
    # file, so that `torch.save(trainer)` can pickle it.
    launcher: Any = strategy.launcher
    launcher.launch = partial(_prepare_and_launch, strategy, before_fit, timeout_seconds)


def _prepare_and_launch(
    strategy: Any,
    before_fit: Callable[[Trainer], ExitStack],
    timeout_seconds: float,
    function: Any,
    *args: Any,
    trainer: Any = None,
    **options: Any,
) -> Any:
    launcher: Any = strategy.launcher
    environment: Any = strategy.cluster_environment
    launch = partial(type(launcher).launch, launcher, function, *args, trainer=trainer, **options)
    for value in (*args, *options.values()):
        refuse_other_namespace(value)

    def all_stop() -> bool:
        return dist.is_initialized() and job_consensus(timeout_seconds).general.flags.agreed != CONTINUE

    with ExitStack() as undo:
        undo.enter_context(upload_folders_too(wait_for_checkpoint))
        if forks_ranks(launcher):
            check_fork(launcher, trainer)
            undo.enter_context(restored_variables())
        starts_ranks = isinstance(environment, LightningEnvironment) and strategy.num_nodes == 1
        if starts_ranks and strategy.num_processes > 1 and not environment.creates_processes_externally:
            os.environ.setdefault(VARIABLE, secrets.token_hex(32))  # passed to the ranks that it starts
            os.environ[LAUNCHER_PID] = str(os.getpid())
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and not is_forked(launcher):
            undo.enter_context(before_fit(trainer))
        if forks_ranks(launcher):
            return fork_ranks(launcher, strategy.num_processes, launch)
        try:
            with watched(trainer, all_stop):
                return launch()
        except BaseException:
            strategy.undo_last = undo.pop_all()  # loggers upload checkpoints before that
            raise


def _are_connected(num_ranks: int) -> bool:
    """Return whether there is a process group. Raises ConfigError: it has another number of ranks."""
    if not dist.is_initialized():
        return False
    if (num_before := dist.get_world_size()) != num_ranks:
        raise ConfigError(
            f"this Trainer has {quantity(num_ranks, 'rank')}, and this process is one of {num_before}, of an earlier "
            "Trainer: a process group stays until the process ends. Use one number of ranks in a program; in a "
            "notebook, restart the kernel."
        )
    return True


def connect_ranks(
    strategy: DDPStrategy, backend: str, timeout: timedelta, watchdog_seconds: float, sets_threads: bool
) -> None:
    """Collective. Meet the other ranks, make the default process group and start the watchdog, unless that is done.

    sets_threads: whether torch's number of threads follows the CPUs that the launcher gives each rank.
    Raises RendezvousError: not all ranks arrive within the timeout. ConfigError: there is a group of other ranks.
    """
    if _are_connected(strategy.world_size):
        return
    rank, num_ranks, num_nodes = strategy.global_rank, strategy.world_size, strategy.num_nodes
    environment: Any = strategy.cluster_environment
    launched, device = launched_of(environment), strategy.root_device
    nodes = launched.nodes if launched else ()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    point = replace(_meeting_point(environment, rank), one_node=num_nodes == 1)

    def log_on_rank(message: str) -> None:
        print(rank_prefixed_message(message, rank), flush=True)

    def watch(port: int, token: str) -> int:
        return start_watchdog(rank, point.host, port, token, watchdog_seconds, nodes, point.one_node)

    watches = {"watch": watch} if num_ranks > 1 else {}
    store = meet(point, rank, num_ranks, timeout.total_seconds(), log_on_rank, nodes, **watches)
    if num_nodes > 1:
        os.environ |= choose_interface(store, rank, num_ranks, point.host, backend, os.environ)
    if (device_index := device_id(device, backend)) and num_ranks > 1:
        refuse_shared_devices(store, rank, num_ranks, device_index)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        # Bound to NCCL alone: with it gloo refuses groups of some ranks on GPUs.
        device_id=device if device.type != "cpu" and "nccl" in backend else None,
    )
    if sets_threads:
        consensus = job_consensus(timeout.total_seconds()).general
        cpus_of_ranks = consensus.all_gather(cpus_of_this_process(strategy.node_rank))
        use_threads(num_threads(cpus_of_ranks, rank, os.environ))
    launcher = launched.by if launched else type(environment).__name__.removesuffix("Environment")
    over = f" over {os.environ[GLOO]}" if num_nodes > 1 and os.environ.get(GLOO) else ""
    rank_zero_info(
        f"{quantity(num_ranks, 'rank')} on {quantity(num_nodes, 'node')}, started by {launcher}, exchange by "
        f"{backend}{over}."
    )


def _meeting_point(environment: ClusterEnvironment, rank: int) -> MeetingPoint:
    if isinstance(environment, LaunchedRanks):
        return environment.launched.point
    host, port = environment.main_address, environment.main_port
    launcher = os.environ.get(LAUNCHER_PID) if rank and isinstance(environment, LightningEnvironment) else None
    name, pid = type(environment).__name__, int(launcher) if launcher else None
    return MeetingPoint(host, (port,), name, launcher_pid=pid, hint=_hint(environment))


def _hint(environment: ClusterEnvironment) -> str:
    """Return what may be wrong where Lightning takes its environment for that of a launcher."""
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None or LAUNCHER_PID in os.environ or not isinstance(environment, LightningEnvironment):
        return ""
    return (
        f" (the environment has LOCAL_RANK={local_rank}, by which Lightning expects a launcher to start every rank, "
        "and starts none; where this process has it by chance, from a shell or a parent process, unset LOCAL_RANK)"
    )
