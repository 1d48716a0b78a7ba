"""One fit of a job: what it is called over restarts, what its checkpoints say of that, and where they are."""

import contextlib
import itertools
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.checkpoint.atomic_folder import remove
from lightning_distrec.errors import ConfigError

FOLDER = ".distrec-jobs"
"""Where the records are, in default_root_dir."""
KEPT_SECONDS = 30 * 24 * 3600.0
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
"""Of the process: a script may fit several times, and its restart numbers the fits in the same order."""


def run_name(option: str | None, variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of the run by the options or the environment; "" for none. Raises ConfigError: it is invalid."""
    name = option if option is not None else variables.get(RUN_NAME, "")
    if name and not re.fullmatch(r"[\w.-]{1,100}", name):
        raise ConfigError(
            f"run_name={name!r}: it becomes part of a file's name. Use 1 to 100 letters, digits, '_', '-' and '.'."
        )
    return name


class JobFit:
    """What one fit of a job keeps over restarts and shares with no other, and a record of where its checkpoints are.

    root: the trainer's default_root_dir. job: what a job keeps over restarts, by its launcher; "" for none. fit: which
    fit of the process it is. run: the user's name for the run; "" for none.
    A job may run several programs: their arguments are part of the name, unless the user names the run.
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
        """The checkpoint that a restart has chosen and compared with its checksums, until it is loaded."""
        self._has_warned = False
        self.take_name(f"run-{run}-fit{fit}" if run else f"{job or 'stopped'}-{program:08x}-fit{fit}")

    def take_name(self, name: str) -> None:
        """Take rank 0's name: programs' arguments may differ between ranks."""
        self.name, self.places = name, Places()
        self.path = self._root / f"{name}.ckpt"
        """The checkpoint that is saved when the job is asked to stop."""
        self._record = self._root / FOLDER / f"{name}.json"

    @property
    def label(self) -> str:
        """What checkpoints of this fit say of it; "" where it has no name."""
        return f"{self.name}@{self.start}" if self.has_name else ""

    def begin(self, label: str) -> None:
        """Begin as a new fit, or go on as that of a checkpoint. label: "@" and what is drawn, or the checkpoint's."""
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
        paths = [path for folder in folders for path in sorted(folder.glob(f"[!.]*{CHECKPOINT_SUFFIX}"))]
        resolved = (path.resolve() for path in [*paths, *map(Path, self.places.files)])  # last.ckpt may be a link
        return list(dict.fromkeys(path for path in resolved if path.exists()))

    def note_saving(self, path: str) -> None:
        """Note where a checkpoint will be, before it is written. On every rank, of which rank 0 writes."""
        if not self.has_name:
            return
        old_places = asdict(self.places)
        # Checkpoints of another start are not looked for any more.
        if self.places.start != self.start:
            self.places = Places(self.start)
        places, local = self.places, Path(path).absolute()
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
        """Note, on rank 0, that the fit has come to its end: only a restart goes on from there, no other start."""
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
        """Note how far a fit has come that fails now. On any rank: in the name of an empty file, since ranks race."""
        if self.has_name and (self.places.folders or self.places.files or self.places.elsewhere):
            with contextlib.suppress(OSError):
                self._record.with_suffix(f"{REACHED}{step}").touch()

    def reached(self) -> int | None:
        """Return the last step that the fit came to before any failure; None where it is not known."""
        steps = [path.name.rpartition(REACHED)[2] for path in self._reached_files()]
        return max((int(step) for step in steps if step.isdecimal()), default=None)

    def _reached_files(self) -> list[Path]:
        # By prefix, not by pattern: names may hold what glob takes for wildcards.
        return [f for f in self._record.parent.glob(f"*{REACHED}*") if f.name.startswith(f"{self.name}{REACHED}")]

    @rank_zero_only
    def _write(self) -> None:
        try:
            if not self._record.exists():
                # Records of jobs that never started again would pile up; nobody else removes them.
                for path in self._record.parent.glob("*"):
                    with contextlib.suppress(OSError):
                        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                            path.unlink()
            replace_file(self._record, json.dumps(asdict(self.places), indent=1).encode())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"{self._record} cannot be written ({error}): a restart looks for checkpoints in the dirpath of "
                    "ModelCheckpoint only. Set default_root_dir to a folder that can be written."
                )
