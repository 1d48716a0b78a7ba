"""Writes files so that each is on disk and complete when a call returns; until then, its old
content stays."""

import contextlib
import io
import math
import os
import threading
import time
import uuid
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

BLOCK_BYTES = 2**20
"""Written at once while others work: between two system calls a core and a disk are free for
them."""


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
    """Write a file under a temporary name, and rename it to `path` once it is on disk; its folder
    is made if missing.

    os.replace swaps the name in one step: a reader, or a machine that crashes, sees the old content
    or the new, never a half. Raises OSError: it cannot be written; the old file stays, and no
    temporary file is left.
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


class Pace:
    """Opens files that are written in blocks, at no more than some bytes per second in all."""

    def __init__(self, bytes_per_second: float = math.inf) -> None:
        self._bytes_per_second = bytes_per_second
        self._is_lifted = threading.Event()
        self._next = 0.0

    def open(self, path: Path) -> IO[bytes]:
        """Open a file to be written."""
        # Buffered: torch hides what an unbuffered file raises behind an error of its own.
        return io.BufferedWriter(_PacedFile(path, self))

    def begin(self) -> None:
        """Let the limit hold from now on."""
        self._is_lifted.clear()
        self._next = time.monotonic()

    def lift(self) -> None:
        """Let no limit hold until `begin`: somebody waits for what is written."""
        self._is_lifted.set()

    def wait(self, num_bytes: int) -> None:
        """Wait until the next `num_bytes` may be written."""
        # What a slow disk or a busy core has missed is not made up for: bursts are what others
        # feel.
        start = max(self._next, time.monotonic())
        self._next = start + num_bytes / self._bytes_per_second
        self._is_lifted.wait(start - time.monotonic())


UNLIMITED = Pace()


class _PacedFile(io.FileIO):
    """A file whose writes are made in blocks, each after a pause."""

    def __init__(self, path: Path, pace: Pace) -> None:
        super().__init__(path, "wb")
        self._pace = pace

    @override
    def write(self, content: Any) -> int:
        remaining = memoryview(content).cast("B")
        while remaining:
            block = remaining[:BLOCK_BYTES]
            self._pace.wait(len(block))
            remaining = remaining[super().write(block) :]
        return memoryview(content).nbytes
