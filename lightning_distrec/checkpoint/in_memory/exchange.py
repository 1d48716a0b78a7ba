"""Sends files from rank to rank, over the connections that the ranks have made to each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 2**26
"""What is sent at once; twice as much is in memory."""


class Sending:
    """The files that one rank sends to another, block by block."""

    def __init__(self, files: list[Path], to: int) -> None:
        self._blocks, self._to = self._read(files), to
        self._block: Tensor | None = None
        self.failure: OSError | None = None
        """Why a file could not be read. Zeros are sent in its place, so that the other rank need not wait."""

    def start(self, group: object) -> dist.Work | None:
        """Send the next block. Return what to wait for; None once all have been sent."""
        self._block = next(self._blocks, None)
        return None if self._block is None else dist.isend(self._block, self._to, group=group)  # type: ignore[arg-type]

    def end(self) -> None:
        """Called once the block has been sent."""
        self._block = None

    def _read(self, files: list[Path]) -> Iterator[Tensor]:
        for path in files:
            left = path.stat().st_size
            with open(path, "rb") as file:
                while left > 0:
                    block = torch.zeros(min(BLOCK_BYTES, left), dtype=torch.uint8)
                    try:
                        file.readinto(memoryview(block.numpy()))  # type: ignore[arg-type]
                    except OSError as error:
                        self.failure = error
                    left -= len(block)
                    yield block


class Receiving:
    """The files that one rank gets from another. sizes: their names and bytes, in the order in which they are sent."""

    def __init__(self, folder: Path, sizes: list[tuple[str, int]], source: int) -> None:
        self._folder, self._source = folder, source
        self._parts = [
            (name, min(BLOCK_BYTES, size - first)) for name, size in sizes for first in range(0, size, BLOCK_BYTES)
        ]
        self._parts.reverse()
        for name, size in sizes:
            if not size:
                (folder / name).touch()
        self._buffer = torch.empty(max((count for _, count in self._parts), default=0), dtype=torch.uint8)
        self._file: IO[bytes] | None = None
        self._current: tuple[str, int] | None = None
        self._name = ""
        self.failure: OSError | None = None
        """Why a file could not be written. What still comes is dropped, so that its sender need not wait."""

    def start(self, group: object) -> dist.Work | None:
        """Receive the next block. Return what to wait for; None once all have come."""
        self._current = self._parts.pop() if self._parts else None
        if self._current is None:
            self._close()
            return None
        return dist.irecv(self._buffer[: self._current[1]], self._source, group=group)  # type: ignore[arg-type]

    def end(self) -> None:
        """Called once the block has come."""
        assert self._current is not None
        name, count = self._current
        try:
            if self.failure is None:
                if name != self._name or self._file is None:
                    self._close()
                    self._file, self._name = open(self._folder / name, "wb"), name  # noqa: SIM115  for several blocks
                self._file.write(memoryview(self._buffer[:count].numpy()))  # type: ignore[arg-type]
        except OSError as error:
            self.failure = error

    def _close(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()  # which writes what is left
        except OSError as error:
            self.failure = error


def transfer(sending: Sending | None, receiving: Receiving | None, group: object) -> None:
    """Send and receive at the same time. Raises OSError: something could not be read or written.

    Each block is posted before any is waited for, so that ranks may send in a ring.
    """
    going: list[Sending | Receiving] = [each for each in (receiving, sending) if each is not None]
    while going:
        started = [(each, each.start(group)) for each in going]
        for each, work in started:
            if work is not None:
                work.wait()
                each.end()
        going = [each for each, work in started if work is not None]
    for done in (receiving, sending):
        if done is not None and done.failure is not None:
            raise done.failure


def sizes_of(files: list[Path]) -> list[tuple[str, int]]:
    """Return name and bytes of each file, as `Receiving` takes them."""
    return [(file.name, file.stat().st_size) for file in files]
