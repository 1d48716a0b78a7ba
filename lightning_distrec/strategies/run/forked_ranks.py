"""Ranks without a script, in a notebook: forked from its process, which gets the trained module back."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.multiprocessing.spawn import ProcessException

from lightning_distrec._compat.lightning_launchers import ForkLauncher, check_cuda_before_fork
from lightning_distrec.cluster.host_resources import THREADS_VARIABLE, end_threads, use_threads
from lightning_distrec.cluster.job_key import KEY_VARIABLE
from lightning_distrec.errors import CheckpointError, ConfigError, RankError
from lightning_distrec.strategies.run.process_runs import PROCESS
from lightning_distrec.units import quantity

WAY_OUT = (
    "Restart the notebook's kernel; or write the code into a file (%%writefile train.py) and start it with !python "
    "train.py or !torchrun."
)
LAUNCHER_PID = "LIGHTNING_DISTREC_LAUNCHER_PID"
"""Set by the process that starts ranks, for them: rank 0 of a script, or a notebook."""
RANK_VARIABLES = ("MASTER_PORT", KEY_VARIABLE, LAUNCHER_PID, THREADS_VARIABLE)


def has_no_script(environment: Any, num_ranks: int, num_nodes: int) -> bool:
    """Return whether Lightning would start the other ranks by running this script again, and there is none.

    In a notebook also for one rank: Lightning refuses launchers that do not fork there.
    Raises ConfigError: they would be on several nodes.
    """
    if environment is None or environment.creates_processes_externally:
        return False
    # `python -` and `python -c` have no file that could be run again, and an interactive session has no script.
    is_notebook = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if not is_notebook and (num_ranks == 1 or sys.argv[0] not in ("-", "-c", "")):
        return False
    if num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes}: a notebook, an interactive session, python - or python -c starts ranks on its own "
            "node only. Write the code into a file (%%writefile train.py), and start it with torchrun or srun."
        )
    return True


def fork_launcher(strategy: Any) -> ForkLauncher:
    """Return a launcher that forks the ranks of a strategy."""
    return ForkLauncher(strategy, partial(_start_rank, strategy), strategy.full_state_dict, PROCESS.leave)


def forks_ranks(launcher: object) -> TypeGuard[ForkLauncher]:
    """Whether this is the process from which ranks are forked."""
    return isinstance(launcher, ForkLauncher) and not launcher.is_rank


def is_forked(launcher: object) -> bool:
    """Whether this is a rank that was forked."""
    return isinstance(launcher, ForkLauncher) and launcher.is_rank


def fork_ranks(launcher: ForkLauncher, num_ranks: int, launch: Callable[[], Any]) -> Any:
    """Run a function on ranks that are forked; return what it returns on rank 0. Raises RankError: a rank was ended."""
    rank_zero_info(f"No script to run again: {quantity(num_ranks, 'rank')} are forked from this process.")
    # A forked process has the parent's OpenMP pool without its threads, and would wait for them at the first large
    # product.
    if not end_threads():
        os.environ[THREADS_VARIABLE] = "1"
        rank_zero_warn("This process's OpenMP cannot end its threads before the fork: each rank has one thread.")
    try:
        result = launch()
    except ProcessException as failure:
        raise RankError(f"rank {failure.error_index}: {str(failure).strip()}") from failure
    if missing := launcher.missing_here:
        rank_zero_warn(
            f"{quantity(len(missing), 'trained tensor')} of the ranks ({', '.join(missing[:3])}) are not in this "
            "process's module, for which configure_model was not called. Use load_from_checkpoint."
        )
    return result


def check_fork(launcher: ForkLauncher, trainer: Trainer) -> None:
    """Raise ConfigError: ranks that are forked now would hang or fail, or would train something else."""
    # Refused before the fork: after it, the ranks would hang, or fail where no message is seen.
    if dist.is_initialized():
        raise ConfigError(
            "ranks cannot be forked from this process: it is a rank itself (it has trained with devices=1, say), and "
            f"they would inherit its process group without the threads of it. {WAY_OUT}"
        )
    try:
        check_cuda_before_fork()
    except RuntimeError as error:
        raise ConfigError(
            "ranks cannot be forked from this process: it has used CUDA (a tensor.cuda(), a torch.cuda call), and no "
            f"forked process could. {WAY_OUT}"
        ) from error
    if launcher.has_trained and trainer.state.fn == TrainerFn.FITTING:
        raise ConfigError(
            "this Trainer has trained on forked ranks, which have ended with their optimizers. Make a new Trainer: it "
            "goes on with the trained weights, or resumes with fit(ckpt_path=...)."
        )


def refuse_half_checkpoint(launcher: object, checkpoint: Mapping[str, Any]) -> None:
    """Raise CheckpointError: ranks that have ended had the optimizers' state that a checkpoint is to hold."""
    if forks_ranks(launcher) and launcher.has_trained and "optimizer_states" in checkpoint:
        raise CheckpointError(
            "trainer.save_checkpoint after a fit on forked ranks: they have ended, with their optimizers' state. Let a "
            "ModelCheckpoint save in the run, or set weights_only=True."
        )


def _start_rank(strategy: Any) -> None:
    strategy.set_world_ranks()
    if os.environ.get(THREADS_VARIABLE) == "1":
        use_threads(1)


@contextmanager
def restored_variables() -> Iterator[None]:
    """Put the variables back that are for the ranks; what this process starts later must not inherit them."""
    earlier = {name: os.environ.get(name) for name in RANK_VARIABLES}
    try:
        yield
    finally:
        for name, value in earlier.items():
            # Cleared first: a variable that was not set before must not be left empty.
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
