"""Writes files so that each is on disk and complete when a call returns; until then, its old content stays."""

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


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and rename it to `path` once it is on disk; its folder is made if missing.

    os.replace swaps the name in one step: a reader, or a machine that crashes, sees the old content or the new, never a
    half. Raises OSError: it cannot be written; the old file stays, and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        write_file(unfinished, content)
        os.replace(unfinished, path)
    except BaseException:  # also of an interrupt, which would leave the temporary file behind
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    # The rename itself is on disk only once its folder is.
    fsync(path.parent)
