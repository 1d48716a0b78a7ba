"""Where a fit begins: at the furthest complete checkpoint that the same job has saved before a restart, if any."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec.checkpoint.atomic_folder import clean_up
from lightning_distrec.checkpoint.contents import open_checkpoint
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, RankError
from lightning_distrec.strategies.checkpoints.checkpoint_io import read_checked
from lightning_distrec.strategies.checkpoints.job_fit import JobFit, Places
from lightning_distrec.units import quantity


class ResumePoint(NamedTuple):
    """A checkpoint from which a fit goes on."""

    path: str
    step: int
    label: str


class Resuming:
    """Decides where one fit begins. Made before the fit, when the trainer's callbacks are as the user made them.

    attempt: how often the launcher, named `launcher`, has started the job again. never: whether not to resume.
    """

    def __init__(
        self, trainer: Trainer, job: JobFit, attempt: int, launcher: str, never: bool, pickles: bool = False
    ) -> None:
        self.job, self._pickles = job, pickles
        self._attempt, self._launcher, self._never = attempt, launcher, never
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        self._without_dirpath = [callback for callback in callbacks if not callback.dirpath]
        dirpaths = [str(callback.dirpath) for callback in callbacks if callback.dirpath]
        self._dirpaths = [Path(dirpath).absolute() for dirpath in dirpaths if "://" not in dirpath]
        self._resumed: ResumePoint | None = None

    def find(self, ckpt_path: Any, ranks: Consensus) -> str | None:
        """Collective. Return the checkpoint from which the fit goes on, if any. ckpt_path: for a job's first start."""
        self.job.take_name(ranks.all_gather(self.job.name)[0])
        self._resumed = newest = None if self._never else self._furthest(ranks)
        self.job.begin(ranks.all_gather(newest.label if newest else f"@{secrets.token_hex(4)}")[0])
        if newest is None:
            self._explain_first_start(ckpt_path)
            return None
        self._explain(newest, ckpt_path)
        # It may have been found in a dirpath alone: then the record does not have it yet.
        self.job.note_saving(newest.path)
        self.job.checked_path = newest.path
        if ranks.rank == 0:
            self.job.reopen()
        return newest.path

    def keep_folders(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        """Let ModelCheckpoints without a dirpath go on in their folder of before the restart; Lightning makes new."""
        if self._resumed is None or str(path) != self._resumed.path:
            return
        for callback in self._without_dirpath:
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if isinstance(state, Mapping) and state.get("dirpath"):
                callback.dirpath = state["dirpath"]

    def _furthest(self, ranks: Consensus) -> ResumePoint | None:
        """Collective. Return the furthest checkpoint that all ranks can read."""
        rank_0 = ranks.rank == 0
        # Rank 0's list for all: file systems may show the ranks different files for a while.
        candidates = ranks.all_or_none("looking for checkpoints", lambda: self._candidates() if rank_0 else [])
        for path, step, label in ranks.all_gather(candidates)[0]:
            # One rank that cannot read it, for example its own rank_<r>.pt, makes all ranks take the next one.
            try:
                read_checked(partial(open_checkpoint, Path(path)), path, ranks, self._pickles)
            except (CheckpointError, RankError, OSError) as error:
                rank_zero_warn(f"A checkpoint of this job is skipped: {error}")
            else:
                return ResumePoint(path, step, label)
        return None

    def _candidates(self) -> list[tuple[str, int, str]]:
        """Return path, step and label of the job's checkpoints, the furthest first. On rank 0."""
        job = self.job
        job.read()
        if job.places.has_ended and not self._attempt and not job.is_named_by_user:
            job.places = Places()  # the old one stays on disk until something is saved
            return []
        for folder in [*job.folders(), *self._dirpaths]:
            with suppress(OSError):  # it may not be writable; then it was not this attempt's either
                for path in clean_up(folder):
                    rank_zero_info(f"A checkpoint is skipped, and removed: {path} was never completed.")
        checkpoints = []
        for path in job.candidates(self._dirpaths):
            try:
                origin = open_checkpoint(path).origin(self._pickles)
            except CheckpointError as error:
                rank_zero_warn(f"A checkpoint is skipped: {error}")
                continue
            if job.has_label(origin.job):
                checkpoints.append((origin.step, origin.written, str(path), origin.job))
        # Of those with equal steps, the last one written comes first.
        return [(path, step, label) for step, _, path, label in sorted(checkpoints, reverse=True)]

    def _beginning(self) -> str:
        return f"Restarted ({self._launcher}, attempt {self._attempt})" if self._attempt else "Started again"

    def _explain(self, newest: ResumePoint, ckpt_path: Any) -> None:
        reached = self.job.reached()
        if self.job.places.has_ended:
            progress = "The fit had come to its end."
        elif reached is None:
            progress = "No rank could note how far the job had come, so how many steps are trained again is not known."
        else:
            num_steps = max(0, reached - newest.step)
            steps = f"{quantity(num_steps, 'step')} {'is' if num_steps == 1 else 'are'} trained again."
            progress = f"The job had come to step {newest.step + num_steps}: {steps}"
        unused_path = f" ckpt_path={str(ckpt_path)!r} was for its first start." if ckpt_path else ""
        rank_zero_info(
            f"{self._beginning()}: training resumes from {newest.path}, step {newest.step}, the furthest complete "
            f"checkpoint of the job {self.job.name}. {progress}{unused_path} To start over, set another run_name, or "
            "stopping={'resume': 'never'}."
        )

    def _explain_first_start(self, ckpt_path: Any) -> None:
        if not self._attempt:
            return
        elsewhere = self.job.places.elsewhere
        beginning = f"{self._beginning()}: training starts {f'from {ckpt_path}' if ckpt_path else 'at step 0'}"
        if self._never:
            rank_zero_info(f"{beginning}, because of stopping={{'resume': 'never'}}.")
        elif elsewhere:
            rank_zero_warn(
                f"{beginning}. Set ckpt_path to {elsewhere[-1]}, which this job has saved, to resume from it."
            )
        else:
            rank_zero_info(
                f"{beginning}. The job {self.job.name} has no complete checkpoint. "
                "ModelCheckpoint(every_n_train_steps=...) saves more often."
            )
