"""Files that are on the disk when a call returns, whole; before that, what was there stays."""

import contextlib
import os
import uuid
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def onto_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside `path`, and give it that name once it is on disk; its folder is made where there is none.

    Raises OSError: it cannot be written. What was under the name stays then, and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        write_file(unfinished, content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    onto_disk(path.parent)
