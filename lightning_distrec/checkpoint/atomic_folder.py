"""A checkpoint on disk, a folder or a file: under its final name only once it is complete.

It is written in a folder of a temporary name next to it; the marker, which lists every file, is
written last; then the folder, or the one file in it, is renamed. So whenever a process or machine
stops, what has its name is complete.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
import zlib
from pathlib import Path
from typing import Any

from lightning_distrec.atomic_files import fsync, write_file
from lightning_distrec.checkpoint.checksums import read_checksums
from lightning_distrec.errors import CheckpointError

MARKER = "complete.json"
CHECKSUMS = "crc32"
"""Key in the marker: name of each file -> the checksums of its blocks."""
MARKER_CHECKSUM = "marker_crc32"
"""Key in the marker: the checksum of the rest of it."""
FORMAT = 2
"""Version of a folder's content; other versions are refused. Tensors of the first were pickled."""
UNFINISHED = ".distrec-unfinished-"
"""Prefix of the names of folders that are being written, or removed."""
REMOVED = f"{UNFINISHED}removed-"
NEW = ".distrec-new-"
NEW_SECONDS = 600.0
"""After this time a folder without a lock is taken for abandoned."""
_LOCK = ".lock"


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint: a folder with its marker, or a file, whose name it
    gets in the end."""
    return path.is_file() or (path / MARKER).is_file()


def read_marker(path: Path) -> dict[str, Any]:
    """Return what the marker says. Raises CheckpointError: the folder is incomplete, damaged, or of
    a later format."""
    try:
        if not (path / MARKER).is_file():
            raise OSError
        marker = json.loads((path / MARKER).read_text())
    except OSError:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {MARKER}, which is written last, is missing. "
            "Use an earlier one."
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MARKER} is damaged: {error}.") from None
    if (
        not isinstance(marker, dict)
        or not isinstance(marker.get("files"), dict)
        or "format" not in marker
    ):
        raise CheckpointError(f"{path / MARKER} is damaged: it does not list the files.")
    check_format(path, marker["format"])
    if marker.pop(MARKER_CHECKSUM, None) not in (None, marker_crc32(marker)):
        raise CheckpointError(f"{path / MARKER} is damaged: it does not match its checksum.")
    for name, size in marker["files"].items():
        # Not isinstance: true in JSON becomes a bool, which is an int in Python.
        if type(size) is not int:
            raise CheckpointError(f"{path / MARKER} is damaged: it has no size for {name!r}.")
        try:
            actual_size = (
                (path / name).stat().st_size if _is_bare(name) and (path / name).is_file() else None
            )
        except (OSError, ValueError):  # no name for a file
            actual_size = None
        if actual_size != size:
            problem = "is missing" if actual_size is None else f"has {actual_size:,} bytes"
            raise CheckpointError(
                f"{path} is damaged: {name} {problem}, and should have {size:,} bytes."
            )
    return marker


def marker_crc32(marker: dict[str, Any]) -> int:
    """Return the checksum of what a marker says."""
    return zlib.crc32(json.dumps(marker, sort_keys=True).encode())


def check_format(path: Path, version: Any, expected: int = FORMAT) -> None:
    """Raise CheckpointError: a checkpoint has another format."""
    if version != expected:
        raise CheckpointError(
            f"{path} has format {version}, and this version of lightning_distrec reads format "
            f"{expected}. Install the version that wrote it; there, `lightning-distrec export "
            f"{path} {path.stem}-plain.ckpt` makes a file that all versions read."
        )


def _is_bare(name: Any) -> bool:
    # Names in a marker may be forged: none leads out of the folder, and the system's calls refuse
    # NUL bytes.
    return (
        isinstance(name, str)
        and os.path.basename(name) == name
        and name not in ("", ".", "..")
        and "\0" not in name
    )


class UnfinishedFolder:
    """A folder that is being written under a temporary name; a lock, which ends with a process,
    shows its writer."""

    def __init__(self, final: Path) -> None:
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path = final.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
        # It must be locked before it has a name that `clean_up` of another job may remove.
        new = final.parent / f"{NEW}{uuid.uuid4().hex}"
        new.mkdir()
        self._lock: int | None = None
        try:
            self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR)
            # The kernel releases it when the process dies, however it dies; a file with a process
            # id would stay.
            with contextlib.suppress(OSError):  # file systems without locks: see _has_writer
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path)
        except BaseException:  # no inode was left for the lock
            shutil.rmtree(new, ignore_errors=True)
            self._unlock()
            raise

    def complete(self, marker: dict[str, Any]) -> None:
        """Write the marker, with the list of files, and rename the folder. A checkpoint of that
        name is replaced.

        marker: with the checksums of files that are known; the others are read.
        """
        files = {}
        checksums = dict(marker.get(CHECKSUMS, {}))
        for file in sorted(self.path.iterdir()):
            if file.name != _LOCK:
                files[file.name] = file.stat().st_size
                checksums[file.name] = checksums.get(file.name) or read_checksums(file)
        content = {"format": FORMAT, "name": self._final.name, **marker, "files": files}
        content[CHECKSUMS] = checksums
        # The marker goes last: it lists files that are on disk already, and without it a folder is
        # no checkpoint.
        signed = {**content, MARKER_CHECKSUM: marker_crc32(content)}
        write_file(self.path / MARKER, json.dumps(signed, indent=1).encode())
        fsync(self.path)
        # lexists: a broken link of that name is in the way, too.
        if os.path.lexists(self._final):
            # Exchanged, not removed and renamed: at no moment is there neither the old checkpoint
            # nor the new one.
            _exchange(self.path, self._final)
            fsync(self._final.parent)
            remove(self.path)
        else:
            os.rename(self.path, self._final)
            # A rename is on disk only with the folder that it is in: a crash might undo it
            # otherwise.
            fsync(self._final.parent)
        # Only now: without its lock file, an unfinished folder would look abandoned to another
        # job's clean_up.
        (self._final / _LOCK).unlink(missing_ok=True)
        self._unlock()

    def complete_as_file(self, name: str) -> None:
        """Give the final name to a file of this folder, and remove the folder. What had that name
        is replaced."""
        file = self.path / name
        fsync(file)
        if self._final.is_dir() and not self._final.is_symlink():
            _exchange(file, self._final)  # no rename replaces a folder by a file
        else:
            os.replace(file, self._final)
        fsync(self._final.parent)
        # An old checkpoint that was a folder has taken the file's place in here, and is removed
        # along.
        self.abandon()

    def abandon(self) -> None:
        """Remove the folder; what is under the final name stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove(path: Path) -> None:
    """Remove a checkpoint: a folder, a file or a link. A folder is renamed first: a reader never
    finds half of one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.exists():
        return
    if not path.name.startswith(UNFINISHED):
        # The name goes first, in one step; deleting the files of a large checkpoint may take
        # minutes.
        path = path.rename(path.parent / f"{REMOVED}{uuid.uuid4().hex}")
    # The marker first: after a crash in between, what is left does not count as a complete
    # checkpoint.
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def clean_up(parent: Path) -> list[Path]:
    """Remove unfinished folders whose writers have died, and return their paths; complete ones get
    their name back."""
    removed = []
    for path in parent.glob(f"{UNFINISHED}*") if parent.is_dir() else []:
        if _has_writer(path):
            continue
        final = _final_name(path)
        # It died after the exchange or before the rename: all is on disk, and only the name is
        # missing.
        if final is not None and not os.path.lexists(parent / final):
            path.rename(parent / final)
            continue
        remove(path)
        removed.append(path)
    for path in parent.glob(f"{NEW}*") if parent.is_dir() else []:
        with contextlib.suppress(OSError):  # its writer may be locking or renaming it now
            if time.time() - path.stat().st_mtime > NEW_SECONDS:
                shutil.rmtree(path)
                removed.append(path)
    return removed


def _final_name(leftover: Path) -> str | None:
    """Return the name that a complete checkpoint should have; None for an incomplete or removed
    one."""
    if leftover.is_symlink() or leftover.name.startswith(REMOVED):
        return None
    try:
        name = read_marker(leftover).get("name")
    except CheckpointError:
        return None
    return name if _is_bare(name) else None


def _has_writer(path: Path) -> bool:
    # A folder that is complete, or being removed, has no lock file. Opened for writing as well: NFS
    # turns flock into locks of byte ranges, and exclusive ones need that.
    with contextlib.suppress(OSError), open(path / _LOCK, "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True  # held, or the file system has no locks
    return False


def _exchange(new: Path, old: Path) -> None:
    """Exchange two paths in one step, where the file system can; else there is a moment without
    `old`."""
    # Python has no function for it. Numbers of Linux: fcntl.h and linux/fs.h.
    AT_FDCWD = -100
    RENAME_EXCHANGE = 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    # NFS and others cannot exchange. Killed in between, both folders are complete, and `clean_up`
    # renames one back.
    aside = old.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)
