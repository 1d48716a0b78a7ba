"""Where a fit begins: at the furthest complete checkpoint that the same job has saved before a restart, if any."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec.checkpoint.atomic_folder import clean_up
from lightning_distrec.checkpoint.incremental.loading import open_checkpoint
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError
from lightning_distrec.strategies.checkpoints.job_fit import JobFit, new_label
from lightning_distrec.units import quantity

OVER = "To start over, set another run_name, or stopping={'resume': 'never'}."


@dataclass(frozen=True)
class Found:
    """A checkpoint from which a fit goes on."""

    path: str
    step: int
    label: str


class Resuming:
    """Decides where one fit begins. Made before the fit, when the trainer's callbacks are as the user made them.

    attempt: how often the launcher has started the job again. by: its name. never: whether the user wants no resuming.
    pickles: whether checkpoints may hold any types, whose code is run.
    """

    def __init__(
        self, trainer: Trainer, job: JobFit, attempt: int, by: str, never: bool, pickles: bool = False
    ) -> None:
        self.job, self._pickles = job, pickles
        self._attempt, self._by, self._never = attempt, by, never
        callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        self._without_dirpath = [each for each in callbacks if not each.dirpath]
        dirpaths = [str(each.dirpath) for each in callbacks if each.dirpath]
        self._dirpaths = [Path(dirpath).absolute() for dirpath in dirpaths if "://" not in dirpath]
        self._found: Found | None = None

    def find(self, given: Any, ranks: Consensus) -> str | None:
        """Collective. Return the checkpoint from which the fit goes on; None: it begins as the user says.

        given: the user's ckpt_path, None for none; it is for the first start of a job.
        """
        self.job.take_name(ranks.all_gather(self.job.name)[0])
        self._found = found = None if self._never else self._furthest(ranks)
        self.job.begin(ranks.all_gather(found.label if found else new_label())[0])
        if found is None:
            self._explain_first_start(given)
            return None
        self._explain(found, given)
        self.job.note_saving(found.path)
        if ranks.rank == 0:
            self.job.record.go_on()
        return found.path

    def keep_folders(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        """Let each ModelCheckpoint without a dirpath go on in the folder that it had before the restart.

        Lightning has given it a new one (lightning_logs/version_1), and would drop what it knows of the checkpoints in
        the old one: which are the best, and which to remove.
        """
        if self._found is None or str(path) != self._found.path:
            return
        for callback in self._without_dirpath:
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if isinstance(state, Mapping) and state.get("dirpath"):
                callback.dirpath = state["dirpath"]

    def _furthest(self, ranks: Consensus) -> Found | None:
        """Collective. Return the furthest checkpoint that all ranks can read."""
        rank_0 = ranks.rank == 0
        mine = ranks.all_or_none("looking for checkpoints", lambda: self._candidates() if rank_0 else [])
        for path, step, label in ranks.all_gather(mine)[0]:
            problems = [problem for problem in ranks.all_gather(self._problem(Path(path), ranks)) if problem]
            if not problems:
                return Found(path, step, label)
            rank_zero_warn(f"A checkpoint of this job is skipped: {problems[0]}")
        return None

    def _problem(self, path: Path, ranks: Consensus) -> str:
        """Return why this rank cannot go on from a checkpoint; "" if it can."""
        try:
            open_checkpoint(path).load(ranks.rank, ranks.num_ranks, self._pickles)
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    def _candidates(self) -> list[tuple[str, int, str]]:
        """Return path, step and label of the job's checkpoints, the furthest first. On rank 0."""
        job, record = self.job, self.job.record
        record.read()
        if record.has_ended and not self._attempt and not job.is_named_by_user:
            record.forget()
            return []
        for folder in [*record.folders(), *self._dirpaths]:
            with suppress(OSError):  # it may not be writable; then it was not this attempt's either
                for path in clean_up(folder):
                    rank_zero_info(f"A checkpoint is skipped, and removed: {path} was never completed.")
        found = []
        for path in record.candidates([*self._dirpaths]):
            try:
                origin = open_checkpoint(path).origin(self._pickles)
            except CheckpointError as error:
                rank_zero_warn(f"A checkpoint is skipped: {error}")
                continue
            if job.has_label(origin.job):
                found.append((origin.step, origin.written, str(path), origin.job))
        return [(path, step, label) for step, _, path, label in sorted(found, reverse=True)]

    def _explain(self, found: Found, given: Any) -> None:
        how = f"Restarted ({self._by}, attempt {self._attempt})" if self._attempt else "Started again"
        words = [
            f"{how}: training resumes from {found.path}, step {found.step}, the furthest complete checkpoint of the "
            f"job {self.job.name}.",
            self._trained_again(found.step),
        ]
        if given:
            words.append(f"ckpt_path={str(given)!r} was for its first start.")
        rank_zero_info(" ".join([*words, OVER]))

    def _trained_again(self, step: int) -> str:
        record = self.job.record
        reached = record.reached()
        if record.has_ended:
            return "The fit had come to its end."
        if reached is None:
            return "No rank could note how far the job had come, so how many steps are trained again is not known."
        again = max(0, reached - step)
        return f"The job had come to step {step + again}: {quantity(again, 'step')} {_is(again)} trained again."

    def _explain_first_start(self, given: Any) -> None:
        record = self.job.record
        where = f"from {given}" if given else "at step 0"
        if not self._attempt:
            return
        how = f"Restarted ({self._by}, attempt {self._attempt})"
        if self._never:
            rank_zero_info(f"{how}: training starts {where}, because of stopping={{'resume': 'never'}}.")
        elif record.elsewhere:
            rank_zero_warn(
                f"{how}: training starts {where}. This job has saved {record.elsewhere[-1]}, but checkpoints are "
                "looked for on file systems only: set ckpt_path to it."
            )
        else:
            rank_zero_info(
                f"{how}: training starts {where}. The job {self.job.name} has no complete checkpoint. "
                "ModelCheckpoint(every_n_train_steps=...) saves more often."
            )


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
