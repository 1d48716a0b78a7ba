"""Checksums of a checkpoint's bytes: CRC-32 of each block of a folder's files, and those that
zipfile tests in a file of torch.save.

A rank reads a share of a folder's blocks, in a few threads.
"""

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lightning_distrec.errors import CheckpointError
from lightning_distrec.ranks import Ranks

BLOCK_BYTES = 16 * 2**20
"""Bytes that a checksum is of."""
READ_BYTES = 2**20
"""Read at once: it stays in a core's cache until its checksum is known."""
NUM_THREADS = 4
DAMAGED = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What zipfile raises: damaged headers may look encrypted (RuntimeError), compressed (zlib.error),
or like a later version's (NotImplementedError, a RuntimeError)."""


class BlockChecksums:
    """The checksums of bytes that are written one after the other."""

    def __init__(self) -> None:
        self.crc32: list[int] = []
        """Of each block; the last one may be shorter."""
        self._num_left = 0
        """Bytes that the last block still takes."""

    def update(self, content: memoryview) -> None:
        """Count in the bytes that follow."""
        while content:
            if not self._num_left:
                self.crc32.append(0)
                self._num_left = BLOCK_BYTES
            part = content[: self._num_left]
            self.crc32[-1] = zlib.crc32(part, self.crc32[-1])
            self._num_left -= len(part)
            content = content[len(part) :]


def checksums_of(content: bytes) -> list[int]:
    """Return the checksums of a file's content."""
    checksums = BlockChecksums()
    checksums.update(memoryview(content))
    return checksums.crc32


class SummedFile(NamedTuple):
    """A file whose checksums are known. label: what messages call it."""

    label: str
    path: Path
    size: int
    crc32: list[int]


class _Block(NamedTuple):
    file: SummedFile
    begin: int
    size: int
    crc32: int

    def is_unchanged(self) -> bool:
        try:
            return read_crc32(self.file.path, self.begin, self.size) == self.crc32
        except OSError:
            return False


def changed_files(files: Sequence[SummedFile], ranks: Ranks | None = None) -> list[str]:
    """Collective, alone without `ranks`. Read the files, each rank some blocks; return the labels
    of those that have changed.

    Raises CheckpointError on every rank: they see other files.
    """
    blocks: list[_Block] = []
    for file in files:
        for number, crc32 in enumerate(file.crc32):
            begin = number * BLOCK_BYTES
            blocks.append(_Block(file, begin, min(BLOCK_BYTES, file.size - begin), crc32))
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.num_ranks)
    # Blocks that follow each other: a rank's own file, where as many ranks load as have saved.
    first = len(blocks) * rank // num_ranks
    end = len(blocks) * (rank + 1) // num_ranks
    changed = set()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        share = blocks[first:end]
        for block, is_unchanged in zip(share, threads.map(_Block.is_unchanged, share), strict=True):
            if not is_unchanged:
                changed.add(block.file.label)
    if ranks is None:
        return sorted(changed)
    expected = [(file.label, file.size, file.crc32) for file in files]
    fingerprint = zlib.crc32(repr(expected).encode())
    for other_fingerprint, rank_changed in ranks.all_gather((fingerprint, sorted(changed))):
        if other_fingerprint != fingerprint:
            place = files[0].path if files else "one"
            raise CheckpointError(f"the ranks see different files in the place of {place}.")
        changed.update(rank_changed)
    return sorted(changed)


def read_crc32(path: Path, begin: int, size: int) -> int:
    """Return the checksum of bytes in a file. Raises OSError: they cannot be read."""
    crc32 = 0
    buffer = memoryview(bytearray(min(size, READ_BYTES)))
    # Read, not mapped: an error of a disk is an exception, and no signal that ends the process.
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while size:
            count = file.readinto(buffer[:size])
            if not count:
                raise OSError(f"{path} ends {size:,} bytes too early")
            crc32 = zlib.crc32(buffer[:count], crc32)
            size -= count
    return crc32


def read_checksums(path: Path) -> list[int]:
    """Return the checksums of a file. Raises OSError: it cannot be read."""
    size = path.stat().st_size
    begins = range(0, size, BLOCK_BYTES)
    return [read_crc32(path, begin, min(BLOCK_BYTES, size - begin)) for begin in begins]


def damaged_records(path: Path) -> list[str] | None:
    """Return the first record of a file of torch.save that does not match its checksum, if any;
    None: it has no checksums. Raises CheckpointError: it cannot be read."""
    with opened_archive(path) as archive:
        if archive is None:
            return None
        record = archive.testzip()
    return [] if record is None else [f"{record} in {path.name}"]


@contextlib.contextmanager
def opened_archive(path: Path) -> Iterator[zipfile.ZipFile | None]:
    """Open a file of torch.save to compare its checksums; None for one that has none: of torch's
    older format, or after torch.serialization.set_crc32_options(False).

    Raises CheckpointError: it is damaged, or a record that is read inside does not match.
    """
    if not zipfile.is_zipfile(path):
        yield None
        return
    try:
        with zipfile.ZipFile(path) as archive:
            has_checksums = any(entry.CRC for entry in archive.infolist())
            yield archive if has_checksums else None
    except DAMAGED as error:
        reason = f"its archive cannot be read ({error})"
        raise CheckpointError(f"{path} is damaged: {reason}.") from None
