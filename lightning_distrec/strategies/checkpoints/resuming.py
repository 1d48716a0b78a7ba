"""A fit of a job over restarts: its name, where its checkpoints are, and the furthest of them, at
which it begins."""

import contextlib
import itertools
import json
import os
import re
import secrets
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.checkpoint.atomic_folder import clean_up, remove
from lightning_distrec.checkpoint.contents import open_checkpoint
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError, RankError
from lightning_distrec.strategies.checkpoints.checkpoint_io import read_checked
from lightning_distrec.units import quantity

FOLDER = ".distrec-jobs"
"""Where the records are, in default_root_dir."""
RETENTION_SECONDS = 30 * 24 * 3600.0
"""After this time without a change a record is removed, by whichever job makes one."""
CHECKPOINT_SUFFIX = ".ckpt"
REACHED = ".reached-"


@dataclass
class Places:
    """What a record says, as its file does."""

    start: str = ""
    """The start of the fit that saved last; "" where it is not known."""
    folders: list[str] = field(default_factory=list)
    """Folders with checkpoints whose names end as Lightning's do."""
    files: list[str] = field(default_factory=list)
    """Checkpoints with other names."""
    elsewhere: list[str] = field(default_factory=list)
    """The last one that is on no file system."""
    has_ended: bool = False
    """Whether the fit came to its end."""


RUN_NAME = "LIGHTNING_DISTREC_RUN_NAME"
"""Variable for `run_name`, where the options do not set it."""

FIT_NUMBERS = itertools.count(1)
"""Of the process: a script may fit several times, and its restart numbers the fits in the same
order."""


def run_name(option: str | None) -> str:
    """Return the name of the run by the options or the environment; "" for none. Raises
    ConfigError: it is invalid."""
    name = option if option is not None else os.environ.get(RUN_NAME, "")
    if name and not re.fullmatch(r"[\w.-]{1,100}", name):
        raise ConfigError(
            f"run_name={name!r}: it becomes part of a file's name. Use 1 to 100 letters, digits, "
            "'_', '-' and '.'."
        )
    return name


class JobFit:
    """What one fit of a job keeps over restarts and shares with no other, and a record of where its
    checkpoints are.

    root: the trainer's default_root_dir. job: what a job keeps over restarts, by its launcher; ""
    for none. fit: which fit of the process it is. run: the user's name for the run; "" for none.
    A job may run several programs: their arguments are part of the name, unless the user names the
    run.
    """

    def __init__(self, root: str, job: str, fit: int = 0, run: str = "") -> None:
        # Not hash(), which Python salts for each process.
        program = zlib.crc32("\0".join(sys.argv).encode())
        self._root = Path(root).absolute()
        self.has_name = bool(run or job)
        """Whether anything shows that two starts are of the same job."""
        self.is_named_by_user = bool(run)
        self.start = ""
        """Drawn where a fit begins at its first step; it differs between fits of the same name."""
        self.checked_path = ""
        """The checkpoint that a restart has chosen and compared with its checksums, until it is
        loaded."""
        self._has_warned = False
        self.take_name(
            f"run-{run}-fit{fit}" if run else f"{job or 'stopped'}-{program:08x}-fit{fit}"
        )

    def take_name(self, name: str) -> None:
        """Take rank 0's name: programs' arguments may differ between ranks."""
        self.name = name
        self.places = Places()
        self.path = self._root / f"{name}.ckpt"
        """The checkpoint that is saved when the job is asked to stop."""
        self._record = self._root / FOLDER / f"{name}.json"

    @property
    def label(self) -> str:
        """What checkpoints of this fit say of it; "" where it has no name."""
        return f"{self.name}@{self.start}" if self.has_name else ""

    def begin(self, label: str) -> None:
        """Begin as a new fit, or go on as that of a checkpoint. label: "@" and what is drawn, or
        the checkpoint's."""
        self.start = label.rpartition("@")[2]

    def has_label(self, label: str) -> bool:
        """Whether a checkpoint is of this fit, of the start in the record if that is known."""
        name, _, start = label.rpartition("@")
        return self.has_name and name == self.name and self.places.start in ("", start)

    def read(self) -> None:
        """Read the record of before this start. On rank 0; nothing where there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.places = Places(**json.loads(self._record.read_text()))

    def folders(self) -> list[Path]:
        """Return the folders in which checkpoints were saved."""
        parents = [Path(file).parent for file in self.places.files]
        return list(dict.fromkeys([*map(Path, self.places.folders), *parents]))

    def candidates(self, more_folders: list[Path]) -> list[Path]:
        """Return what may be a checkpoint of the fit. more_folders: to look into."""
        folders = dict.fromkeys([*map(Path, self.places.folders), *more_folders])
        paths = [
            path for folder in folders for path in sorted(folder.glob(f"[!.]*{CHECKPOINT_SUFFIX}"))
        ]
        # last.ckpt may be a link
        resolved = (path.resolve() for path in [*paths, *map(Path, self.places.files)])
        return list(dict.fromkeys(path for path in resolved if path.exists()))

    def note_saving(self, path: str) -> None:
        """Note where a checkpoint will be, before it is written. On every rank, of which rank 0
        writes."""
        if not self.has_name:
            return
        old_places = asdict(self.places)
        # Checkpoints of another start are not looked for any more.
        if self.places.start != self.start:
            self.places = Places(self.start)
        places = self.places
        local = Path(path).absolute()
        if "://" in path:
            places.elsewhere = [path]
        # Others in the folder of the checkpoint on stopping are not of this job.
        elif path == str(self.path) or local.suffix != CHECKPOINT_SUFFIX:
            places.files = list(dict.fromkeys([*places.files, str(local)]))
        else:
            places.folders = list(dict.fromkeys([*places.folders, str(local.parent)]))
        # Most saves change nothing: folders are noted, and not the checkpoints in them.
        if asdict(places) != old_places:
            self._write()

    def reopen(self) -> None:
        """Note that a fit that may have come to its end goes on. On rank 0."""
        if self.places.has_ended:
            self.places.has_ended = False
            self._write()

    def end(self) -> None:
        """Note, on rank 0, that the fit has come to its end: only a restart goes on from there, no
        other start."""
        if not self.has_name:
            return
        remove(self.path)
        for path in self._reached_files():
            path.unlink(missing_ok=True)
        if self.candidates([]):
            self.places.has_ended = True
            self._write()
            return
        with contextlib.suppress(OSError):
            self._record.unlink(missing_ok=True)
            self._record.parent.rmdir()  # where it is the last one

    def note_failure(self, step: int) -> None:
        """Note how far a fit has come that fails now. On any rank: in the name of an empty file,
        since ranks race."""
        if self.has_name and (self.places.folders or self.places.files or self.places.elsewhere):
            with contextlib.suppress(OSError):
                self._record.with_suffix(f"{REACHED}{step}").touch()

    def reached(self) -> int | None:
        """Return the last step that the fit came to before any failure; None where it is not
        known."""
        steps = [path.name.rpartition(REACHED)[2] for path in self._reached_files()]
        return max((int(step) for step in steps if step.isdecimal()), default=None)

    def _reached_files(self) -> list[Path]:
        # By prefix, not by pattern: names may hold what glob takes for wildcards.
        files = []
        for f in self._record.parent.glob(f"*{REACHED}*"):
            if f.name.startswith(f"{self.name}{REACHED}"):
                files.append(f)
        return files

    @rank_zero_only
    def _write(self) -> None:
        try:
            if not self._record.exists():
                # Records of jobs that never started again would pile up; nobody else removes them.
                for path in self._record.parent.glob("*"):
                    with contextlib.suppress(OSError):
                        if time.time() - path.stat().st_mtime > RETENTION_SECONDS:
                            path.unlink()
            replace_file(self._record, json.dumps(asdict(self.places), indent=1).encode())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"{self._record} cannot be written ({error}): a restart looks for checkpoints "
                    "in the dirpath of ModelCheckpoint only. Set default_root_dir to a folder that "
                    "can be written."
                )


class ResumePoint(NamedTuple):
    """A checkpoint from which a fit goes on."""

    path: str
    step: int
    label: str


class Resuming:
    """Decides where one fit begins. Made before the fit, when the trainer's callbacks are as the
    user made them.

    attempt: how often the launcher, named `launcher`, has started the job again. never: whether not
    to resume.
    """

    def __init__(
        self,
        trainer: Trainer,
        job: JobFit,
        attempt: int,
        launcher: str,
        never: bool,
        pickles: bool = False,
    ) -> None:
        self.job = job
        self._pickles = pickles
        self._attempt = attempt
        self._launcher = launcher
        self._never = never
        callbacks = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
        ]
        self._without_dirpath = [callback for callback in callbacks if not callback.dirpath]
        dirpaths = [str(callback.dirpath) for callback in callbacks if callback.dirpath]
        self._dirpaths = [Path(dirpath).absolute() for dirpath in dirpaths if "://" not in dirpath]
        self._resumed: ResumePoint | None = None

    def find(self, ckpt_path: Any, ranks: Consensus) -> str | None:
        """Collective. Return the checkpoint from which the fit goes on, if any. ckpt_path: for a
        job's first start."""
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
        """Let ModelCheckpoints without a dirpath go on in their folder of before the restart;
        Lightning makes new."""
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
        candidates = ranks.all_or_none(
            "looking for checkpoints", lambda: self._candidates() if rank_0 else []
        )
        for path, step, label in ranks.all_gather(candidates)[0]:
            # One rank that cannot read it, for example its own rank_<r>.pt, makes all ranks take
            # the next one.
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
                    rank_zero_info(
                        f"A checkpoint is skipped, and removed: {path} was never completed."
                    )
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
        return (
            f"Restarted ({self._launcher}, attempt {self._attempt})"
            if self._attempt
            else "Started again"
        )

    def _explain(self, newest: ResumePoint, ckpt_path: Any) -> None:
        reached = self.job.reached()
        if self.job.places.has_ended:
            progress = "The fit had come to its end."
        elif reached is None:
            progress = (
                "No rank could note how far the job had come, so how many steps are trained again "
                "is not known."
            )
        else:
            num_steps = max(0, reached - newest.step)
            steps = (
                f"{quantity(num_steps, 'step')} {'is' if num_steps == 1 else 'are'} trained again."
            )
            progress = f"The job had come to step {newest.step + num_steps}: {steps}"
        unused_path = f" ckpt_path={str(ckpt_path)!r} was for its first start." if ckpt_path else ""
        rank_zero_info(
            f"{self._beginning()}: training resumes from {newest.path}, step {newest.step}, the "
            f"furthest complete checkpoint of the job {self.job.name}. {progress}{unused_path} To "
            "start over, set another run_name, or stopping={'resume': 'never'}."
        )

    def _explain_first_start(self, ckpt_path: Any) -> None:
        if not self._attempt:
            return
        elsewhere = self.job.places.elsewhere
        beginning = (
            f"{self._beginning()}: training starts "
            f"{f'from {ckpt_path}' if ckpt_path else 'at step 0'}"
        )
        if self._never:
            rank_zero_info(f"{beginning}, because of stopping={{'resume': 'never'}}.")
        elif elsewhere:
            rank_zero_warn(
                f"{beginning}. Set ckpt_path to {elsewhere[-1]}, which this job has saved, to "
                "resume from it."
            )
        else:
            rank_zero_info(
                f"{beginning}. The job {self.job.name} has no complete checkpoint. "
                "ModelCheckpoint(every_n_train_steps=...) saves more often."
            )
