"""Signals to one rank or to all: a signal is recorded, and all ranks stop between the same two
steps."""

import re
import signal
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec._compat.lightning import ignore_signal_after_run, stop_between_steps
from lightning_distrec.cluster.consensus import CONTINUE, REQUEUE, STOP, Consensus, PendingMin
from lightning_distrec.cluster.environment import SlurmRanks
from lightning_distrec.cluster.slurm import requeue
from lightning_distrec.errors import ConfigError
from lightning_distrec.option_values import plain_fields
from lightning_distrec.strategies.checkpoints.checkpointing import Checkpointing
from lightning_distrec.strategies.checkpoints.resuming import JobFit, run_name

STOPPED = 128 + signal.SIGTERM
"""Exit code after SIGTERM: that of any program which the signal ends."""
TRY_AGAIN = 75
"""Exit code where the job is to run again: EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """What a signal does to a run."""

    auto_requeue: bool = True
    """Under Slurm: whether `requeue_signal` to any rank makes all ranks save a checkpoint and
    requeue the job."""
    requeue_signal: str = "SIGUSR1"
    """The signal before the time limit; `sbatch --signal=USR1@90` sends SIGUSR1 90 seconds before
    it."""
    on_sigterm: Literal["stop", "checkpoint"] = "stop"
    """What SIGTERM to any rank does: "stop" all ranks, or save a "checkpoint" before."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a fit resumes from the furthest complete checkpoint that the same job has saved
    before a restart."""
    run_name: str | None = None
    """Name of the run: a script that is started again with it is the same job. None:
    LIGHTNING_DISTREC_RUN_NAME, or the id of torchrun's or Slurm's job."""

    def __post_init__(self) -> None:
        plain_fields(self)
        if not re.fullmatch("SIG[A-Z0-9]+", self.requeue_signal) or not hasattr(
            signal, self.requeue_signal
        ):
            signal_name = self.requeue_signal
            raise ConfigError(
                f"stopping: requeue_signal={signal_name!r} is no signal of this machine. Use "
                "SIGUSR1."
            )
        run_name(self.run_name)


class StopHandler:
    """Replaces Lightning's signal handlers, and its broadcast of a stop flag in every step, until
    `undo`.

    step_consensus: for what is exchanged once in every step. job: what the fit is called in its
    job.
    """

    def __init__(
        self,
        trainer: Trainer,
        step_consensus: Consensus,
        checkpoints: Checkpointing,
        options: StopOptions,
        job: JobFit,
    ) -> None:
        self._trainer = trainer
        self._consensus = step_consensus
        self._checkpoints = checkpoints
        self._options = options
        self._job = job
        self._flags = step_consensus.flags
        # The consensus outlives runs: what an earlier run was asked to do must not stop this one.
        self._flags.reset()
        self._message: PendingMin | None = None
        self._num_exchanges = 0
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        # Lightning reads both attributes when it installs its handlers, under Slurm only; a user's
        # plugin stays.
        if isinstance(environment, SlurmRanks):
            environment.auto_requeue = options.auto_requeue
            environment.requeue_signal = signal.Signals[options.requeue_signal]
        self._patches = stop_between_steps(trainer, self._record, self._leave)
        if isinstance(environment, SlurmRanks) and options.auto_requeue:
            self._patches.enter_context(
                ignore_signal_after_run(trainer, signal.Signals[options.requeue_signal])
            )

    def undo(self, has_failed: bool) -> None:
        """Restore Lightning's handlers. has_failed: the run has, or was stopped, so that its job's
        checkpoint stays."""
        if (
            self._trainer.is_global_zero
            and self._trainer.state.fn == TrainerFn.FITTING
            and not has_failed
        ):
            self._job.end()
        self._patches.close()
        self._flags.watch(None)

    def note_failure(self, exception: BaseException) -> None:
        """Note how far a fit has come that fails now. On this rank: others may be gone."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            return
        # its user's will: started again, it begins again
        if isinstance(exception, KeyboardInterrupt):
            if self._trainer.is_global_zero:
                self._job.end()
        else:
            self._job.note_failure(self._trainer.global_step)

    def _record(self, is_requeue: bool) -> None:
        # A handler runs between any two lines of the program, where no collective may be made: it
        # only records.
        self._flags.request(REQUEUE if is_requeue else STOP)

    def ends_evaluation(self) -> bool:
        """Collective, in each step of an evaluation. Return whether the evaluation ends here.

        It does not where a checkpoint is to be saved first: that is done between two training
        steps.
        """
        return self._exchange_requests() == STOP and self._options.on_sigterm == "stop"

    def _exchange_requests(self) -> int:
        """Collective, in each step. Return the request that all ranks know of.

        Where the step before had no message that could carry it, one is sent for it here, and read
        in the next step.
        """
        if self._consensus.num_ranks == 1:
            return self._flags.requested
        # One step late on purpose: the exchange overlaps with the step, and no step waits for it on
        # the host.
        message = self._message
        self._message = None
        if message is not None:
            message.wait()
        # Flags go along with all messages of a step: one of their own is needed only where there
        # was none.
        if self._flags.num_exchanges == self._num_exchanges:
            self._message = self._consensus.start_all_reduce_min()
        self._num_exchanges = self._flags.num_exchanges
        return self._flags.agreed

    def _leave(self) -> int | None:
        """Collective, between two training steps. Return the exit code to leave with; None: no rank
        was asked to."""
        agreed = self._exchange_requests()
        if agreed == CONTINUE:
            return None
        if agreed == REQUEUE or self._options.on_sigterm == "checkpoint":
            # One save by all ranks, between the same two steps: it is collective, as every
            # checkpoint is.
            path = self._job.path
            rank_zero_info(f"Asked to stop: saving {path} after step {self._trainer.global_step}.")
            self._trainer.save_checkpoint(path)
            self._checkpoints.finish(has_failed=False)
        if agreed == STOP:
            return STOPPED
        if self._trainer.is_global_zero:
            problem = requeue()
            if problem:
                rank_zero_warn(
                    f"the job is not requeued: {problem}. All ranks leave with code {TRY_AGAIN}; "
                    "started again as the same job, it resumes from the checkpoint."
                )
            else:
                rank_zero_info("Requeued.")
        # srun --kill-on-bad-exit ends the other ranks once one ends with a code, so wait until rank
        # 0 has requeued.
        self._consensus.all_reduce_min(0)
        return TRY_AGAIN
