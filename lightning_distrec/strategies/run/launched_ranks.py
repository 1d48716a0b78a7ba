"""How the ranks of a strategy are started and meet: by a launcher, by Lightning, or forked from a
notebook."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import (
    rank_prefixed_message,
    rank_zero_info,
    rank_zero_warn,
)
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from typing_extensions import override

from lightning_distrec._compat.gloo import one_socket_thread
from lightning_distrec._compat.lightning_checkpoints import upload_folders_too
from lightning_distrec._compat.lightning_launchers import (
    ForkLauncher,
    check_cuda_before_fork,
    ranks_started_by,
)
from lightning_distrec._compat.torch import default_store
from lightning_distrec.checkpoint.save import wait_for_checkpoint
from lightning_distrec.cluster.consensus import CONTINUE, job_consensus
from lightning_distrec.cluster.early_ranks import start_rank
from lightning_distrec.cluster.environment import (
    LaunchedRanks,
    check_numbers,
    check_variables,
    complete_launched,
    restored_variables,
)
from lightning_distrec.cluster.host_resources import (
    GLOO,
    THREADS_VARIABLE,
    choose_interface,
    cpus_of_this_process,
    end_threads,
    num_threads,
    reserve_open_files,
    use_threads,
)
from lightning_distrec.cluster.launched import MeetingPoint
from lightning_distrec.cluster.meeting import meet
from lightning_distrec.errors import CheckpointError, ConfigError, RankError
from lightning_distrec.gpu import device_id, refuse_shared_devices
from lightning_distrec.strategies.run.process_runs import PROCESS, Waits
from lightning_distrec.units import quantity

WAY_OUT = (
    "Restart the notebook's kernel; or write the code into a file (%%writefile train.py) and start "
    "it with !python train.py or !torchrun."
)
CHANGE = (
    "lightning_distrec works with lightning.pytorch: write `import lightning.pytorch as pl` for "
    "`import pytorch_lightning as pl`, and `from lightning.pytorch...` for `from "
    "pytorch_lightning...`, in all files. For an installed package that imports it, write `import "
    "lightning_distrec.pytorch_lightning` before its import."
)
LAUNCHER_PID = "LIGHTNING_DISTREC_LAUNCHER_PID"
"""Set by the process that starts ranks, for them: rank 0 of a script, or a notebook."""
RANK_VARIABLES = ("MASTER_PORT", LAUNCHER_PID, THREADS_VARIABLE)


def refuse_other_namespace(instance: object) -> None:
    """Raises ConfigError: the class of a module, data module or callback is, or inherits from,
    pytorch_lightning's."""
    if any(kind.__module__.split(".")[0] == "pytorch_lightning" for kind in type(instance).__mro__):
        raise ConfigError(
            f"{type(instance).__name__} inherits from a class of pytorch_lightning; the Trainer is "
            f"one of lightning.pytorch, for which that is another class. {CHANGE}"
        )


def refuse_other_callbacks(callbacks: Iterable[Any]) -> None:
    """Raises ConfigError: a callback is one of pytorch_lightning's."""
    # Lightning calls its hooks, but treats it as none of its own: a ModelCheckpoint is neither
    # called last nor found by `trainer.checkpoint_callbacks`, and an average of weights would not
    # be one of shards.
    for callback in callbacks:
        refuse_other_namespace(callback)


def has_no_script(environment: Any, num_ranks: int, num_nodes: int) -> bool:
    """Return whether Lightning would start the other ranks by running this script again, and there
    is none.

    In a notebook also for one rank: Lightning refuses launchers that do not fork there.
    Raises ConfigError: they would be on several nodes.
    """
    if environment is None or environment.creates_processes_externally:
        return False
    # `python -` and `python -c` have no file that could be run again, and an interactive session
    # has no script.
    is_notebook = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if not is_notebook and (num_ranks == 1 or sys.argv[0] not in ("-", "-c", "")):
        return False
    if num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes}: a notebook, an interactive session, python - or python -c "
            "starts ranks on its own node only. Write the code into a file, and start it with "
            "torchrun or srun."
        )
    return True


def fork_launcher(strategy: Any) -> ForkLauncher:
    """Return a launcher that forks the ranks of a strategy."""
    return ForkLauncher(
        strategy, partial(_start_rank, strategy), strategy.full_state_dict, PROCESS.leave
    )


def forks_ranks(launcher: object) -> TypeGuard[ForkLauncher]:
    """Whether this is the process from which ranks are forked."""
    return isinstance(launcher, ForkLauncher) and not launcher.is_rank


def is_forked(launcher: object) -> bool:
    """Whether this is a rank that was forked."""
    return isinstance(launcher, ForkLauncher) and launcher.is_rank


def fork_ranks(launcher: ForkLauncher, num_ranks: int, launch: Callable[[], Any]) -> Any:
    """Run a function on ranks that are forked; return what it returns on rank 0. Raises RankError:
    a rank was ended."""
    rank_zero_info(
        f"No script to run again: {quantity(num_ranks, 'rank')} are forked from this process."
    )
    # A forked process has the parent's OpenMP pool without its threads, and would wait for them.
    if not end_threads():
        os.environ[THREADS_VARIABLE] = "1"
        rank_zero_warn(
            "This process's OpenMP cannot end its threads before the fork: each rank has one "
            "thread."
        )
    try:
        result = launch()
    except ProcessException as failure:
        raise RankError(f"rank {failure.error_index}: {str(failure).strip()}") from failure
    missing = launcher.missing_names
    if missing:
        rank_zero_warn(
            f"{quantity(len(missing), 'trained tensor')} of the ranks ({', '.join(missing[:3])}) "
            "are not in this process's module, for which configure_model was not called. Use "
            "load_from_checkpoint."
        )
    return result


def check_fork(launcher: ForkLauncher, trainer: Trainer) -> None:
    """Raise ConfigError: ranks that are forked now would hang or fail, or would train something
    else."""
    # Refused before the fork: after it, the ranks would hang, or fail where no message is seen.
    if dist.is_initialized():
        raise ConfigError(
            "ranks cannot be forked from this process: it is a rank itself (trained with "
            f"devices=1, say). {WAY_OUT}"
        )
    try:
        check_cuda_before_fork()
    except RuntimeError as error:
        raise ConfigError(
            f"ranks cannot be forked from this process: it has used CUDA. {WAY_OUT}"
        ) from error
    if launcher.has_trained and trainer.state.fn == TrainerFn.FITTING:
        raise ConfigError(
            "this Trainer has trained on forked ranks, which have ended with their optimizers. "
            "Make a new Trainer: it goes on with the trained weights, or resumes with "
            "fit(ckpt_path=...)."
        )


def refuse_half_checkpoint(launcher: object, checkpoint: Mapping[str, Any]) -> None:
    """Raise CheckpointError: ranks that have ended had the optimizers' state that a checkpoint is
    to hold."""
    if forks_ranks(launcher) and launcher.has_trained and "optimizer_states" in checkpoint:
        raise CheckpointError(
            "trainer.save_checkpoint after a fit on forked ranks: they have ended, with their "
            "optimizers' state. Let a ModelCheckpoint save in the run, or set weights_only=True."
        )


def _start_rank(strategy: Any) -> None:
    strategy.set_world_ranks()
    if os.environ.get(THREADS_VARIABLE) == "1":
        use_threads(1)


def wrap_launch(
    strategy: Any, before_fit: Callable[[Trainer], ExitStack], timeout_seconds: float
) -> None:
    """Let a strategy's launcher call `before_fit`, for the run, before every fit, and watch over
    every run."""
    # On the instance: Lightning calls strategy.launcher.launch before any hook of the strategy. Of
    # a function of this file, so that `torch.save(trainer)` can pickle it.
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
        return (
            dist.is_initialized()
            and job_consensus(timeout_seconds).general.flags.agreed != CONTINUE
        )

    with ExitStack() as undo:
        undo.enter_context(upload_folders_too(wait_for_checkpoint))
        if forks_ranks(launcher):
            check_fork(launcher, trainer)
            # They are for the ranks; what this process starts later must not inherit them.
            undo.enter_context(restored_variables(RANK_VARIABLES))
        # Before Lightning's launcher starts the other ranks, which inherit this process's
        # environment.
        starts_ranks = isinstance(environment, LightningEnvironment) and strategy.num_nodes == 1
        if (
            starts_ranks
            and strategy.num_processes > 1
            and not environment.creates_processes_externally
        ):
            os.environ[LAUNCHER_PID] = str(os.getpid())
            undo.enter_context(ranks_started_by(start_rank))
        if (
            trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
            and not is_forked(launcher)
        ):
            undo.enter_context(before_fit(trainer))
        if forks_ranks(launcher):
            return fork_ranks(launcher, strategy.num_processes, launch)
        try:
            with PROCESS.run(trainer, all_stop, timeout_seconds):
                return launch()
        except BaseException:
            strategy.undo_last = undo.pop_all()  # loggers upload checkpoints before that
            raise


class NoBatchNorm(LayerSync):
    """What sync_batchnorm=True does on a CPU: nothing, where a module has no layers for it."""

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for path, layer in model.named_modules():
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                raise ConfigError(
                    f"Trainer(sync_batchnorm=True) on a CPU, and '{path}' is "
                    f"{type(layer).__name__}: torch's SyncBatchNorm computes on GPUs only. Leave "
                    "it out: each rank normalizes by its own batch."
                )
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        return model


def check_trainer(strategy: Any, trainer_nodes: int) -> None:
    """Raise ConfigError: a strategy's Trainer contradicts the ranks that were started, or its
    device."""
    # Lightning has set it, a private attribute, by now.
    if vars(strategy).get("_layer_sync") is not None and strategy.root_device.type == "cpu":
        vars(strategy)["_layer_sync"] = NoBatchNorm()
    launched = strategy.launched
    environment = strategy.cluster_environment
    num_devices = strategy.num_processes
    if launched is not None and launched.place is None:
        check_numbers(
            launched, num_devices, strategy.accelerator.auto_device_count(), trainer_nodes
        )
    elif isinstance(environment, LightningEnvironment) and environment.creates_processes_externally:
        check_variables(os.environ, num_devices, trainer_nodes)


def connect_ranks(
    strategy: Any, backend: str, waits: Waits, sets_threads: bool, trainer_nodes: int
) -> None:
    """Collective. Meet the other ranks, make the default process group and start its heartbeat,
    unless that is done.

    sets_threads: whether torch's number of threads follows the CPUs that the launcher gives each
    rank. trainer_nodes: the Trainer's num_nodes.
    Raises RendezvousError: not all ranks arrive in time. ConfigError: there is a group of other
    ranks, or the variables of ranks that were started by hand contradict each other or the Trainer.
    """
    rank = strategy.global_rank
    num_ranks = strategy.world_size
    if dist.is_initialized():
        num_before = dist.get_world_size()
        if num_before != num_ranks:
            raise ConfigError(
                f"this Trainer has {quantity(num_ranks, 'rank')}, and this process is one of "
                f"{num_before}, of an earlier Trainer. Use one number of ranks in a program; in a "
                "notebook, restart the kernel."
            )
        _find_place(strategy, default_store(), trainer_nodes)
        return
    timeout = waits.timeout
    start_seconds = min(waits.start_seconds, waits.timeout.total_seconds())
    environment = strategy.cluster_environment
    launched = strategy.launched
    device = strategy.root_device
    names = launched.nodes if launched else ()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    find_loss = partial(_find_loss, strategy)
    point = _meeting_point(environment)
    point = replace(point, one_node=point.one_node or strategy.num_nodes == 1, find_loss=find_loss)

    def log_on_rank(message: str) -> None:
        print(rank_prefixed_message(message, rank), flush=True)

    def watch(host: str, port: int) -> int:
        nodes = list(names) or num_ranks * [""]
        return PROCESS.start_heartbeat(rank, point, nodes, host, port, waits)

    watches = {"watch": watch} if num_ranks > 1 else {}
    if num_ranks > 1:
        reserve_open_files(num_ranks, backend)
    store = meet(point, rank, num_ranks, start_seconds, log_on_rank, names, **watches)
    store.set_timeout(timeout)
    _find_place(strategy, store, trainer_nodes)
    num_nodes = strategy.num_nodes
    # Before the process group is made: gloo and NCCL read their interface from the environment when
    # they connect.
    if num_nodes > 1:
        os.environ |= choose_interface(store, rank, num_ranks, point.host, backend, os.environ)
    device_index = device_id(device, backend)
    if device_index and num_ranks > 1:
        refuse_shared_devices(store, rank, num_ranks, device_index)
    with one_socket_thread() if backend == "gloo" else nullcontext():
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
    launcher = (
        launched.launcher if launched else type(environment).__name__.removesuffix("Environment")
    )
    over = f" over {os.environ[GLOO]}" if num_nodes > 1 and os.environ.get(GLOO) else ""
    rank_zero_info(
        f"{quantity(num_ranks, 'rank')} on {quantity(num_nodes, 'node')}, started by {launcher}, "
        f"exchange by {backend}{over}."
    )


def _find_place(strategy: Any, store: Any, trainer_nodes: int) -> None:
    """Collective. Count the nodes of ranks that were started by hand, once per process. Raises as
    `connect_ranks`."""
    if strategy.launched is not None and strategy.launched.place is not None:
        strategy.cluster_environment.launched = complete_launched(strategy.launched, store)
        check_trainer(strategy, trainer_nodes)


def _meeting_point(environment: ClusterEnvironment) -> MeetingPoint:
    if isinstance(environment, LaunchedRanks):
        return environment.launched.point
    is_lightning = isinstance(environment, LightningEnvironment)
    local_rank = os.environ.get("LOCAL_RANK")
    hint = ""
    if is_lightning and local_rank is not None and LAUNCHER_PID not in os.environ:
        hint = (
            f" (the environment has LOCAL_RANK={local_rank}, so that Lightning starts no ranks; "
            "where no launcher has set it, unset it)"
        )
    # Two jobs of one user may get one port by mistake; their launching processes differ.
    identity = f"{type(environment).__name__} {os.environ.get(LAUNCHER_PID, '')}"
    return MeetingPoint(environment.main_address, (environment.main_port,), identity, hint=hint)


def _find_loss(strategy: Any) -> str:
    """Return which rank that this process has started, or that has started it, has ended; "" if it
    sees none."""
    is_started = (
        isinstance(strategy.cluster_environment, LightningEnvironment) and strategy.global_rank
    )
    # A process whose parent has ended is given to another parent.
    if is_started and os.environ.get(LAUNCHER_PID) not in (None, str(os.getppid())):
        return "the process that started this rank (rank 0) is gone. Its own output says why."
    for number, process in enumerate(getattr(strategy.launcher, "procs", ()), start=1):
        if isinstance(process, subprocess.Popen) and process.poll() is not None:
            rank = strategy.global_rank + number
            end = (
                f"rank {rank} has ended with status {process.returncode} before all ranks had "
                "arrived"
            )
            return f"{end}. Its own output says why."
    return ""
