"""Checksums of a checkpoint's bytes: CRC-32 of whole files, and of the records that torch.save's
archives are made of.

Bytes are read in blocks, each by one of the ranks, in a few threads; the checksums of blocks are
combined.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from typing_extensions import override

from lightning_distrec.errors import CheckpointError
from lightning_distrec.ranks import Ranks

BLOCK_BYTES = 16 * 2**20
READ_BYTES = 2**20
"""Read at once: it stays in a core's cache until its checksum is known."""
NUM_THREADS = 4
POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the lowest power in the highest bit."""


class ByteRange(NamedTuple):
    """Bytes of a file whose checksum is known. label: what messages call it."""

    label: str
    path: Path
    begin: int
    size: int
    crc32: int


def changed_ranges(
    ranges: Sequence[ByteRange],
    ranks: Ranks | None = None,
    on_progress: Callable[[int], None] = lambda size: None,
) -> set[str]:
    """Collective, alone without `ranks`. Read the ranges, each rank some blocks; return the labels
    of what has changed.

    on_progress: called with numbers of bytes. Raises CheckpointError on every rank: they see other
    files.
    """
    blocks = [
        (number, start, min(BLOCK_BYTES, item.size - start))
        for number, item in enumerate(ranges)
        for start in range(0, item.size, BLOCK_BYTES)
    ]
    local_crcs: list[int] = []
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        share = _share_of(blocks, *((ranks.rank, ranks.num_ranks) if ranks is not None else (0, 1)))
        places = (
            (ranges[number].path, ranges[number].begin + start, size)
            for number, start, size in share
        )
        for (*_, size), crc32 in zip(
            share, threads.map(lambda place: _readable_crc32(*place), places), strict=True
        ):
            local_crcs.append(crc32)
            on_progress(size)
    list_crc32 = zlib.crc32(repr([(item.label, *item[2:]) for item in ranges]).encode())
    reports = (
        ranks.all_gather([list_crc32, *local_crcs])
        if ranks is not None
        else [[list_crc32, *local_crcs]]
    )
    if any(report[0] != list_crc32 for report in reports):
        raise CheckpointError(
            f"the ranks see different files in the place of {ranges[0].path if ranges else 'one'}."
        )
    crcs = [0] * len(ranges)
    for (number, _, size), crc32 in zip(
        blocks, (c for report in reports for c in report[1:]), strict=True
    ):
        # What cannot be read stays different from any checksum.
        crcs[number] = (
            -1 if crc32 < 0 or crcs[number] < 0 else combine_crc32(crcs[number], crc32, size)
        )
    return {item.label for item, crc32 in zip(ranges, crcs, strict=True) if item.crc32 != crc32}


def _share_of(
    blocks: Sequence[tuple[int, int, int]], rank: int, num_ranks: int
) -> list[tuple[int, int, int]]:
    """Return blocks that follow each other: a rank's own file, where as many ranks load as have
    saved."""
    share, begin, total = [], 0, sum(size for *_, size in blocks)
    for block in blocks:
        if begin * num_ranks // total == rank:
            share.append(block)
        begin += block[2]
    return share


def _readable_crc32(path: Path, begin: int, size: int) -> int:
    """Return the checksum of bytes in a file; -1 where they cannot be read."""
    try:
        return read_crc32(path, begin, size)
    except (OSError, ValueError, OverflowError):
        return -1


def read_crc32(path: Path, begin: int, size: int) -> int:
    """Return the checksum of bytes in a file. Raises OSError: they cannot be read."""
    crc32, buffer = 0, memoryview(bytearray(min(size, READ_BYTES)))
    # Read, not mapped: an error of a disk is an exception, and no signal that ends the process.
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while size:
            if not (count := file.readinto(buffer[:size])):
                raise OSError(f"{path} ends {size:,} bytes too early")
            crc32, size = zlib.crc32(buffer[:count], crc32), size - count
    return crc32


def combine_crc32(first: int, second: int, second_size: int) -> int:
    """Return the checksum of bytes that are followed by `second_size` others. Source: zlib's
    crc32_combine."""
    return _multiply(_shift(second_size), first) ^ second


@cache
def _shift(num_bytes: int) -> int:
    """Return x to the power of 8 * num_bytes, modulo CRC's polynomial."""
    power, square, exponent = 1 << 31, 1 << 23, num_bytes
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square, exponent = _multiply(square, square), exponent >> 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if b >> bit & 1:
            product ^= a
        a = a >> 1 ^ (POLYNOMIAL if a & 1 else 0)
    return product


def read_archive(path: Path, begin: int = 0, size: int | None = None) -> list[ByteRange]:
    """Return the records of an archive of torch.save that lies in a file, by their names, in the
    order of their places.

    size: None for all from `begin`. Raises CheckpointError: it is none, or its headers are damaged.
    """
    try:
        with open(path, "rb") as file:
            part = _Part(file, begin, path.stat().st_size - begin if size is None else size)
            with zipfile.ZipFile(io.BufferedReader(part)) as archive:
                entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
                records = [_record(path, part, entry) for entry in entries]
    # Damaged headers may look encrypted (RuntimeError), or like a later version's
    # (NotImplementedError, one as well).
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged: its archive cannot be read ({error}).") from None
    if len({record.label for record in records}) < len(records):
        raise CheckpointError(f"{path} is damaged: a record is in its archive twice.")
    return records


def _record(path: Path, part: "_Part", entry: zipfile.ZipInfo) -> ByteRange:
    part.seek(entry.header_offset)
    name = entry.orig_filename.encode()
    header = part.read(30 + len(name))
    # torch takes a record's place from the header in front of it, and the rest from the directory.
    signature, method, name_size, extra_size = struct.unpack("<4s4xH16xHH", header[:30])
    is_stored = (
        method == entry.compress_type == zipfile.ZIP_STORED
        and entry.compress_size == entry.file_size
    )
    begin = entry.header_offset + 30 + name_size + extra_size
    if signature != b"PK\3\4" or header[30:] != name or name_size != len(name) or not is_stored:
        raise zipfile.BadZipFile(f"the header of {entry.orig_filename!r} is not as it was written")
    if begin + entry.file_size > part.size:
        raise zipfile.BadZipFile(f"{entry.orig_filename!r} would end behind it")
    return ByteRange(entry.orig_filename, path, part.begin + begin, entry.file_size, entry.CRC)


def has_checksums(records: Sequence[ByteRange]) -> bool:
    """Whether an archive was saved with checksums: torch.serialization.set_crc32_options(False)
    writes zeros."""
    return any(record.crc32 for record in records)


def archives_crc32(path: Path, places: Sequence[tuple[int, int]]) -> int:
    """Return the checksum of a file of archives; of records it is taken from there, so that little
    is read.

    places: offset and length of each archive, which follow each other. Raises CheckpointError,
    OSError: unreadable.
    """
    crc32 = end = 0
    for offset, length in sorted(places):
        records = read_archive(path, offset, length)
        # Of what lies between the records, headers and directories, and of records without a
        # checksum.
        for record in records if has_checksums(records) else []:
            gap = record.begin - end
            crc32 = combine_crc32(
                combine_crc32(crc32, read_crc32(path, end, gap), gap), record.crc32, record.size
            )
            end = record.begin + record.size
    remaining = path.stat().st_size - end
    return combine_crc32(crc32, read_crc32(path, end, remaining), remaining)


class _Part(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self.begin, self.size, self._place = file, begin, size, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(
            0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        )
        return self._place

    @override
    def readinto(self, buffer: Any) -> int:
        self._file.seek(self.begin + self._place)
        content = self._file.read(max(0, min(len(buffer), self.size - self._place)))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)
