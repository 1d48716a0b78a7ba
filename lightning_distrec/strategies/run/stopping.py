"""Signals to one rank or to all: they are noted, and all ranks stop at the same boundary between two steps."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec._compat.lightning import stop_between_steps
from lightning_distrec.cluster.consensus import CONTINUE, REQUEUE, STOP, Consensus, PendingMin
from lightning_distrec.cluster.environment import SlurmRanks
from lightning_distrec.cluster.slurm import requeue
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.checkpoints.job_checkpoint import JobCheckpoint

STOPPED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as that of any program which that signal ends."""
TRY_AGAIN = 75
"""Exit code where the job is to run again and nobody has requeued it: EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """What a signal does to a run."""

    auto_requeue: bool = True
    """Under Slurm: `requeue_signal` to any rank makes all of them save a checkpoint and leave; the job is requeued."""
    requeue_signal: str = "SIGUSR1"
    """The signal that `sbatch --signal=USR1@90` sends, 90 seconds before the time is over."""
    on_sigterm: Literal["stop", "checkpoint"] = "stop"
    """Whether a checkpoint is saved when SIGTERM has asked any rank to stop."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a fit without ckpt_path goes on from what the same job, requeued or restarted, has saved so."""

    def __post_init__(self) -> None:
        if not re.fullmatch("SIG[A-Z0-9]+", self.requeue_signal) or not hasattr(signal, self.requeue_signal):
            raise ConfigError(
                f"stopping: requeue_signal={self.requeue_signal!r} is no signal of this machine. Use SIGUSR1, say."
            )
        for name, allowed in (("on_sigterm", ("stop", "checkpoint")), ("resume", ("auto", "never"))):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"stopping: {name}={value!r} is not known. Use {' or '.join(map(repr, allowed))}.")

    def apply(self, environment: object) -> None:
        """Let Lightning listen to the signal, which it does under Slurm alone; a user's plugin stays as it is."""
        if isinstance(environment, SlurmRanks):
            environment.auto_requeue = self.auto_requeue
            environment.requeue_signal = signal.Signals[self.requeue_signal]


class StopHandler:
    """Takes the place of Lightning's signal handlers and of its broadcast at every step, until `undo` is called.

    of_steps: the consensus for what is said once at every step. checkpoint: what is saved before the ranks leave.
    """

    def __init__(self, trainer: Trainer, of_steps: Consensus, options: StopOptions, checkpoint: JobCheckpoint) -> None:
        self._trainer = trainer
        self._of_steps = of_steps
        self._options = options
        self._checkpoint = checkpoint
        self._flags = of_steps.flags
        self._flags.reset()
        self._message: PendingMin | None = None
        self._num_exchanges = 0
        options.apply(trainer.strategy.cluster_environment)  # type: ignore[attr-defined]
        self._undo: Callable[[], None] = stop_between_steps(trainer, self._note, self._leave)

    def undo(self, has_failed: bool) -> None:
        """Give Lightning its own back. has_failed: the run has, or was stopped; what it has saved for later stays."""
        if self._trainer.is_global_zero and self._trainer.state.fn == TrainerFn.FITTING and not has_failed:
            self._checkpoint.remove()
        self._undo()
        self._flags.watch(None)

    def _note(self, is_requeue: bool) -> None:
        self._flags.request(REQUEUE if is_requeue else STOP)

    def ends_evaluation(self) -> bool:
        """Collective, at each step of an evaluation: whether it is to end here.

        It goes on where a checkpoint is to be saved first, which is done between two steps of training.
        """
        agreed = self._agreed()
        return agreed == STOP and self._options.on_sigterm == "stop"

    def _agreed(self) -> int:
        """Collective, at each step. Return what all ranks know that one was asked to do.

        Where the step before had no agreement that could tell them, there is one for it, which is read at the next.
        """
        if self._of_steps.num_ranks == 1:
            return self._flags.requested
        message, self._message = self._message, None
        if message is not None:
            message.wait()
        if self._flags.num_exchanges == self._num_exchanges:
            self._message = self._of_steps.start_all_reduce_min()
        self._num_exchanges = self._flags.num_exchanges
        return self._flags.agreed

    def _leave(self) -> int | None:
        """Collective, between two steps. Return the code to leave with; None: nothing was asked."""
        agreed = self._agreed()
        if agreed == CONTINUE:
            return None
        if agreed == REQUEUE or self._options.on_sigterm == "checkpoint":
            path = self._checkpoint.path
            rank_zero_info(f"Asked to stop: saving {path} after step {self._trainer.global_step}.")
            self._trainer.save_checkpoint(path)
            self._trainer.strategy.finish_checkpoints(has_failed=False)  # type: ignore[attr-defined]
        if agreed == STOP:
            return STOPPED
        if self._trainer.is_global_zero:
            _requeue_and_say()
        # Where one rank ends with a code, srun --kill-on-bad-exit ends the others: first rank 0 is to be done.
        self._of_steps.all_reduce_min(0)
        return TRY_AGAIN


def _requeue_and_say() -> None:
    if problem := requeue():
        rank_zero_warn(
            f"the job is not requeued: {problem}. All ranks leave with code {TRY_AGAIN}; started again as the same "
            "job, it goes on from the checkpoint."
        )
    else:
        rank_zero_info("Requeued.")
