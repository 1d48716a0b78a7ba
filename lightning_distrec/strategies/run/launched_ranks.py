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
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info

from lightning_distrec._compat.lightning_checkpoints import upload_folders_too
from lightning_distrec.checkpoint.save import wait_for_checkpoint
from lightning_distrec.cluster.consensus import CONTINUE, job_consensus
from lightning_distrec.cluster.environment import LaunchedRanks
from lightning_distrec.cluster.host_resources import (
    GLOO,
    choose_interface,
    cpus_of_this_process,
    num_threads,
    use_threads,
)
from lightning_distrec.cluster.job_key import KEY_VARIABLE
from lightning_distrec.cluster.rendezvous import MeetingPoint, meet
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
from lightning_distrec.strategies.run.process_runs import PROCESS
from lightning_distrec.units import quantity


def wrap_launch(strategy: Any, before_fit: Callable[[Trainer], ExitStack], timeout_seconds: float) -> None:
    """Let a strategy's launcher call `before_fit` before every fit, and watch over every run that it launches.

    What `before_fit` patches, and that loggers upload our folders, lasts for the run. Lightning's own launcher, on one
    node, passes the ranks that it starts a key of their job.
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
        # Before Lightning's launcher starts the other ranks, which inherit this process's environment.
        starts_ranks = isinstance(environment, LightningEnvironment) and strategy.num_nodes == 1
        if starts_ranks and strategy.num_processes > 1 and not environment.creates_processes_externally:
            os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(32))  # passed to the ranks that it starts
            os.environ[LAUNCHER_PID] = str(os.getpid())
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and not is_forked(launcher):
            undo.enter_context(before_fit(trainer))
        if forks_ranks(launcher):
            return fork_ranks(launcher, strategy.num_processes, launch)
        try:
            with PROCESS.run(trainer, all_stop):
                return launch()
        except BaseException:
            strategy.undo_last = undo.pop_all()  # loggers upload checkpoints before that
            raise


def connect_ranks(strategy: Any, backend: str, timeout: timedelta, watchdog_seconds: float, sets_threads: bool) -> None:
    """Collective. Meet the other ranks, make the default process group and start the watchdog, unless that is done.

    sets_threads: whether torch's number of threads follows the CPUs that the launcher gives each rank.
    Raises RendezvousError: not all ranks arrive within the timeout. ConfigError: there is a group of other ranks.
    """
    rank, num_ranks, num_nodes = strategy.global_rank, strategy.world_size, strategy.num_nodes
    if dist.is_initialized():
        if (num_before := dist.get_world_size()) != num_ranks:
            raise ConfigError(
                f"this Trainer has {quantity(num_ranks, 'rank')}, and this process is one of {num_before}, of an "
                "earlier Trainer: a process group stays until the process ends. Use one number of ranks in a program; "
                "in a notebook, restart the kernel."
            )
        return
    environment, launched, device = strategy.cluster_environment, strategy.launched, strategy.root_device
    nodes = launched.nodes if launched else ()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    point = replace(_meeting_point(environment, rank), one_node=num_nodes == 1)

    def log_on_rank(message: str) -> None:
        print(rank_prefixed_message(message, rank), flush=True)

    def watch(port: int, token: str) -> int:
        return PROCESS.start_watchdog(rank, point, list(nodes), port, token, watchdog_seconds)

    watches = {"watch": watch} if num_ranks > 1 else {}
    store = meet(point, rank, num_ranks, timeout.total_seconds(), log_on_rank, nodes, **watches)
    # Before the process group is made: gloo and NCCL read their interface from the environment when they connect.
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
    launcher = launched.launcher if launched else type(environment).__name__.removesuffix("Environment")
    over = f" over {os.environ[GLOO]}" if num_nodes > 1 and os.environ.get(GLOO) else ""
    rank_zero_info(
        f"{quantity(num_ranks, 'rank')} on {quantity(num_nodes, 'node')}, started by {launcher}, exchange by "
        f"{backend}{over}."
    )


def _meeting_point(environment: ClusterEnvironment, rank: int) -> MeetingPoint:
    if isinstance(environment, LaunchedRanks):
        return environment.launched.point
    is_lightning = isinstance(environment, LightningEnvironment)
    launcher = os.environ.get(LAUNCHER_PID)
    local_rank, hint = os.environ.get("LOCAL_RANK"), ""
    if is_lightning and local_rank is not None and launcher is None:
        hint = (
            f" (the environment has LOCAL_RANK={local_rank}, by which Lightning expects a launcher to start every "
            "rank, and starts none; where this process has it by chance, from a shell or a parent process, unset "
            "LOCAL_RANK)"
        )
    return MeetingPoint(
        environment.main_address,
        (environment.main_port,),
        type(environment).__name__,
        launcher_pid=int(launcher) if launcher and rank and is_lightning else None,
        hint=hint,
    )
