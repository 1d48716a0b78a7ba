"""One fit of a job: what it is called over restarts, and what the checkpoints that it saves say of that."""

import itertools
import os
import re
import secrets
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

from lightning_distrec.checkpoint.atomic_folder import remove
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.checkpoints.job_record import JobRecord

RUN_NAME = "LIGHTNING_DISTREC_RUN_NAME"
"""Variable for `run_name`, where the options do not set it."""

_fits = itertools.count(1)


def next_fit() -> int:
    """Return 1 for the first fit of this process, and so on, whichever trainer's it is."""
    return next(_fits)


def run_name(option: str | None, variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of the run by the options or the environment; "" for none. Raises ConfigError: it is invalid."""
    name = option if option is not None else variables.get(RUN_NAME, "")
    if name and not re.fullmatch(r"[\w.-]{1,100}", name):
        raise ConfigError(
            f"run_name={name!r}: it becomes part of a file's name. Use 1 to 100 letters, digits, '_', '-' and '.'."
        )
    return name


def new_label() -> str:
    """Return a label for a fit that begins at its first step."""
    return f"@{secrets.token_hex(4)}"


class JobFit:
    """What one fit of a job keeps over restarts and shares with no other.

    root: the trainer's default_root_dir. job: what a job keeps over restarts, by its launcher; "" for none. fit: which
    fit of the process it is, see `next_fit`. run: the user's name for the run; "" for none.
    A job may run several programs: their arguments are part of the name, unless the user names the run.
    """

    def __init__(self, root: str, job: str, fit: int = 0, run: str = "") -> None:
        program = zlib.crc32("\0".join(sys.argv).encode())
        self._root = Path(root).absolute()
        self.has_name = bool(run or job)
        """Whether anything shows that two starts are of the same job."""
        self.is_named_by_user = bool(run)
        self.start = ""
        """Drawn where a fit begins at its first step; it differs between fits of the same name."""
        self.take_name(f"run-{run}-fit{fit}" if run else f"{job or 'stopped'}-{program:08x}-fit{fit}")

    def take_name(self, name: str) -> None:
        """Take rank 0's name: programs' arguments may differ between ranks."""
        self.name = name
        self.path = self._root / f"{name}.ckpt"
        """The checkpoint that is saved when the job is asked to stop."""
        self.record = JobRecord(self._root, name)

    @property
    def label(self) -> str:
        """What checkpoints of this fit say of it; "" where it has no name."""
        return f"{self.name}@{self.start}" if self.has_name else ""

    def begin(self, label: str) -> None:
        """Begin as a new fit, or go on as that of a checkpoint. label: `new_label`, or the checkpoint's."""
        self.start = label.rpartition("@")[2]

    def has_label(self, label: str) -> bool:
        """Whether a checkpoint is of this fit, of the start in the record if that is known."""
        name, _, start = label.rpartition("@")
        return self.has_name and name == self.name and self.record.start in ("", start)

    def note_saving(self, path: str) -> None:
        """Note where a checkpoint will be, before it is written. On every rank; rank 0 writes."""
        if self.has_name:
            self.record.note_saving(path, self.start, is_alone=path == str(self.path))

    def end(self) -> None:
        """Note that the fit has come to its end: another start begins again, and only a restart goes on from there.

        On rank 0.
        """
        if self.has_name:
            remove(self.path)
            self.record.end()

    def note_failure(self, step: int) -> None:
        """Note how far a fit has come that fails now. On any rank."""
        if self.has_name:
            self.record.note_reached(step)
