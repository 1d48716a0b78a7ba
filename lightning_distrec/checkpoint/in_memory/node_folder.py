"""The folder of one job in the memory of this node: its user's alone, and it outlives the ranks."""

import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.errors import ConfigError

LAUNCHER = "launcher.json"
"""File that says which process has started the ranks: once it has ended, nobody asks for the copies again."""
MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")
YOUNG_SECONDS = 60.0


class NodeFolder:
    """The folder of a job. root: where it is, in memory. job: the name that the job keeps over restarts."""

    def __init__(self, root: Path, job: str) -> None:
        self._root = root
        self._of_user = root / f"lightning_distrec-{os.getuid()}"
        self.path = self._of_user / job

    def open(self) -> None:
        """Make the folder where there is none, and remove those of jobs whose launcher on this node has ended.

        Raises ConfigError: it is not in memory, cannot be made, or is somebody else's.
        """
        kind = _file_system_of(self._root)
        if kind not in IN_MEMORY:
            where = f"is on {kind}, not in memory" if self._root.is_dir() else "does not exist"
            raise ConfigError(
                f"checkpoint: in_memory: folder='{self._root}' {where}. Set a folder on a tmpfs, as /dev/shm is."
            )
        try:
            self._of_user.mkdir(mode=0o700, exist_ok=True)
            self._must_be_private()
            for other in self._of_user.iterdir():
                if other != self.path and _is_over(other):
                    shutil.rmtree(other, ignore_errors=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            replace_file(self.path / LAUNCHER, json.dumps(_process(os.getppid())).encode())
        except OSError as error:
            raise ConfigError(
                f"checkpoint: in_memory: {self.path} cannot be made: {error}. Set folder to another tmpfs."
            ) from error

    def _must_be_private(self) -> None:
        found = self._of_user.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"checkpoint: in_memory: {self._of_user} is not a folder that only this user can read, so its copies "
                "cannot be trusted. Remove it, or set another folder."
            )

    def used_bytes(self) -> int:
        """Return how many bytes the job's copies have."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def free_bytes(self) -> int:
        """Return how many bytes the file system has left."""
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def remove(self) -> None:
        """Remove all copies of the job on this node."""
        shutil.rmtree(self.path, ignore_errors=True)


def _file_system_of(folder: Path) -> str:
    """Return the type of the file system that a folder is on; "" if there is no such folder."""
    if not folder.is_dir():
        return ""
    resolved, found = folder.resolve(), ("", "")
    for line in MOUNTS.read_text().splitlines():
        _, at, kind, *_ = line.split()
        if resolved.is_relative_to(at) and len(at) >= len(found[0]):
            found = (at, kind)
    return found[1]


def _process(pid: int) -> dict[str, Any]:
    """Return what shows whether a process still lives: its id is given to another one some day."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return {"pid": pid, "started": started, "space": os.readlink("/proc/self/ns/pid")}


def _is_over(folder: Path) -> bool:
    """Whether a job's launcher has ended; False where it is another container's, and cannot be seen from here."""
    try:
        if time.time() - folder.stat().st_mtime < YOUNG_SECONDS:
            return False  # it may be about to write the file
        noted = json.loads((folder / LAUNCHER).read_text())
        now = _process(int(noted["pid"]))
        return bool(noted["space"] == now["space"] and noted["started"] != now["started"])
    except (OSError, ValueError, TypeError, KeyError):
        return True
