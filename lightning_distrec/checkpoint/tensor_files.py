"""Tensors in safetensors files: each rank writes its chunks into files of its own, and reads from
all of them what it needs, by the rectangle.

The header's length, 8 bytes, little-endian; the header, JSON, with each tensor's type, shape and
place; the tensors' bytes, little-endian, without gaps.
Source: https://github.com/huggingface/safetensors#format Where chunks begin is in the metadata, as
torch.distributed.checkpoint writes it: its HuggingFaceStorageReader reads our folders, too.
Its writer copies all chunks of a rank twice, and keeps the last one of several of one tensor.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from lightning_distrec.atomic_files import UNLIMITED, Pace, fsync
from lightning_distrec.checkpoint.checksums import READ_BYTES, BlockChecksums
from lightning_distrec.checkpoint.lazy_tensors import MappedTensor, read_blocks
from lightning_distrec.checkpoint.plain_state import STORED_TYPES
from lightning_distrec.chunks import (
    Box,
    Chunk,
    ChunkedTensor,
    LazyTensor,
    narrowed,
    num_bytes,
    overlap,
    row_ranges,
)
from lightning_distrec.errors import CheckpointError

SUFFIX = ".safetensors"
_DTYPES = {name: dtype for dtype, name in STORED_TYPES.items()}
PLAIN = {"format": "pt"}
"""Metadata of a file of full tensors."""
PLACES = "DCP_SHARDING_INFO"
"""Key in the metadata: JSON, name of a tensor -> {OFFSETS: where its chunk begins}."""
OFFSETS = "saved_offsets"


def write_safetensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    metadata: Mapping[str, str] = PLAIN,
    pace: Pace = UNLIMITED,
    alignment: int = 8,
) -> list[int]:
    """Write a file, byte for byte as the library does, and return its checksums.

    on_progress: called with numbers of bytes. alignment: of the first tensor; the library's is 8.
    Raises OSError; CheckpointError: a type is unknown.
    """
    order = list(STORED_TYPES)
    for name, lazy in tensors.items():
        if lazy.dtype not in order:
            problem = f"'{name}' is a tensor of {lazy.dtype}, which safetensors files cannot hold"
            raise CheckpointError(f"{problem}. Use another type.")
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    checksums = BlockChecksums()
    with pace.open(path) as file:
        header = _header({name: tensors[name] for name in names}, metadata, alignment)
        checksums.update(memoryview(header))
        file.write(header)
        for name in names:
            write_blocks(file, tensors[name], on_progress, checksums)
    return checksums.crc32


def _header(
    tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str], alignment: int
) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, lazy in tensors.items():
        end = begin + num_bytes(lazy)
        entries[name] = {
            "dtype": STORED_TYPES[lazy.dtype],
            "shape": list(lazy.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Blanks up to a multiple, as the library has them: the tensors behind are aligned.
    text += b" " * (-(8 + len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text


def write_blocks(
    file: IO[bytes],
    lazy: LazyTensor,
    on_progress: Callable[[int], None],
    checksums: BlockChecksums | None = None,
) -> None:
    """Write a tensor's bytes. A function of its own, so that no block of it is held while the next
    tensor is read."""
    for block in read_blocks(lazy):
        content = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
        # Few at a time: they are still in a core's cache when they are written.
        for begin in range(0, len(content), READ_BYTES):
            part = content[begin : begin + READ_BYTES]
            if checksums is not None:
                checksums.update(part)
            file.write(part)
        on_progress(len(content))


def tensors_file(rank: int, number: int = 0) -> str:
    """Return the name of a file with tensors of a rank."""
    return f"rank_{rank}{f'_{number}' if number else ''}{SUFFIX}"


def write_tensors(
    folder: Path, tensors: Mapping[str, ChunkedTensor], rank: int, pace: Pace = UNLIMITED
) -> dict[str, list[int]]:
    """Write this rank's chunks of tensors, and wait until they are on disk; return the checksums of
    the files, by name.

    A file has a name once: a rank's second chunk of a tensor goes into a second file.
    Raises OSError; CheckpointError: a type is unknown.
    """
    files: list[dict[str, Chunk]] = []
    for name, chunked in tensors.items():
        number = 0
        for chunk in chunked.chunks:
            if not math.prod(chunk.tensor.shape):
                continue
            if number == len(files):
                files.append({})
            files[number][name] = chunk
            number += 1
    checksums = {}
    for number, chunk_by_name in enumerate(files):
        path = folder / tensors_file(rank, number)
        checksums[path.name] = _write_chunks(path, chunk_by_name, pace)
    return checksums


def _write_chunks(path: Path, chunk_by_name: Mapping[str, Chunk], pace: Pace) -> list[int]:
    places = {}
    handles: dict[str, LazyTensor] = {}
    for name, chunk in chunk_by_name.items():
        places[name] = {OFFSETS: chunk.offsets}
        # Tools put handles in place of tensors, which are read when they are written.
        source: Any = chunk.tensor
        is_handle = isinstance(source, LazyTensor)
        handles[name] = source if is_handle else MappedTensor(source.detach())
    metadata = {**PLAIN, "DCP_VERSION": "1.0", PLACES: json.dumps(places)}
    checksums = write_safetensors(path, handles, metadata=metadata, pace=pace)
    fsync(path)
    return checksums


class StoredChunk(NamedTuple):
    """A rectangle of a tensor in a file."""

    box: Box
    dtype: torch.dtype
    path: Path
    begin: int
    """Where its bytes begin in the file."""

    def copy_into(self, chunk: Chunk) -> None:
        """Copy what the chunk has of it; a block of rows at a time is mapped into memory."""
        box = overlap(chunk.box, self.box)
        if box is None:
            return
        target = chunk.tensor.detach()
        offsets, sizes = self.box
        begins, counts = box
        if not begins:
            target.copy_(self._map_rows(0, 1)[0])
            return
        block_shape = (counts[0], *sizes[1:])
        for first, count in row_ranges(block_shape, self.dtype.itemsize):
            row = begins[0] + first
            rows = self._map_rows(row - offsets[0], count)
            block = (row, *begins[1:]), (count, *counts[1:])
            values = narrowed(rows, (row, *offsets[1:]), block)
            narrowed(target, chunk.offsets, block).copy_(values)

    def _map_rows(self, first: int, count: int) -> Tensor:
        """Return rows of it, by their numbers in the chunk. Mapped for them alone: pages count as
        memory of this process for as long as they are mapped."""
        _, sizes = self.box
        shape = (count, *sizes[1:])
        row_bytes = self.dtype.itemsize * math.prod(sizes[1:])
        begin = self.begin + first * row_bytes
        # Memory is mapped from a multiple of a page's size.
        before = begin % mmap.ALLOCATIONGRANULARITY
        size = before + count * row_bytes
        with open(self.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin - before)
        return torch.frombuffer(memory, dtype=self.dtype, offset=before).view(shape)


@dataclass(frozen=True, eq=False)
class StoredTensor(LazyTensor):
    """A tensor in safetensors files."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: Sequence[StoredChunk]

    @override
    def read_into(self, chunks: Sequence[Chunk]) -> None:
        for stored in self.stored:
            try:
                for chunk in chunks:
                    stored.copy_into(chunk)
            except (OSError, ValueError, OverflowError, RuntimeError) as error:
                problem = f"{stored.path}: '{self.name}' cannot be read: {error!r}."
                raise CheckpointError(problem) from error


def read_header(path: Path) -> dict[str, StoredChunk]:
    """Return the chunks in a file, by the names of their tensors. Raises CheckpointError."""
    try:
        # The library compares what the header says with the file: tensors fill it, without overlap.
        # Through numpy, since through torch it would map the file as memory that may be written.
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
        places = json.loads(metadata.get(PLACES, "null"))
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}.") from None
    header.pop("__metadata__", None)
    chunks = {}
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            problem = f"'{name}' has the type {entry['dtype']}, which is not supported"
            raise CheckpointError(f"{path}: {problem}.")
        offsets = (0,) * len(shape) if places is None else _offsets(path, places, name)
        begin = 8 + size + entry["data_offsets"][0]
        chunks[name] = StoredChunk((offsets, shape), dtype, path, begin)
    return chunks


def _offsets(path: Path, places: Any, name: str) -> tuple[int, ...]:
    """Return where a chunk begins in its tensor. Raises CheckpointError: it is not known."""
    try:
        # A TypeError where these are no integers.
        return tuple(torch.Size(places[name][OFFSETS]))
    except (KeyError, TypeError, RuntimeError, OverflowError) as error:
        problem = f"where '{name}' begins is not as it was written ({error!r})"
        raise CheckpointError(f"{path} is damaged: {problem}.") from None


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return handles of the tensors in a file, which are full. Raises CheckpointError."""
    tensors: dict[str, LazyTensor] = {}
    for name, chunk in read_header(path).items():
        offsets, shape = chunk.box
        if any(offsets):
            problem = f"{path} has a part of '{name}', from {offsets}"
            raise CheckpointError(f"{problem}. Give the folder that it is from.")
        tensors[name] = StoredTensor(name, shape, chunk.dtype, [chunk])
    return tensors


class StoredTensors:
    """The tensors of a checkpoint's folder. Raises CheckpointError: one of `files` is damaged."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self.chunks: dict[str, list[StoredChunk]] = {}
        """Name of a tensor -> its chunks."""
        for file in files:
            for name, chunk in read_header(folder / file).items():
                self.chunks.setdefault(name, []).append(chunk)

    def handle(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        """Return a tensor's handle. Raises CheckpointError: its chunks are not all of it, once."""
        chunks = self.chunks.get(name, [])
        # State and tensors are in several files: if they are of two checkpoints, it shows here.
        same_type = all(chunk.dtype == dtype for chunk in chunks)
        if not same_type or not cover([chunk.box for chunk in chunks], shape):
            problem = f"the chunks of '{name}' are not all of it, once: {shape} of {dtype}"
            raise CheckpointError(f"{self._folder} is damaged: {problem}.")
        return StoredTensor(name, shape, dtype, chunks)


def cover(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether rectangles cover a tensor of this shape, nothing of it twice."""
    num_elements = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape):
            return False
        num_elements += math.prod(sizes)
        for offset, size, end in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or offset + size > end:
                return False
    # Boxes of the right total size that do not overlap leave no gap.
    if num_elements != math.prod(shape):
        return False
    reaching: list[Box] = []  # boxes that begin at earlier rows and reach down to this one
    for box in sorted(boxes):
        # Sorted by their first row, so that boxes which end above this one meet no later box
        # either. A number has no rows, and one box.
        reaching = [other for other in reaching if other[0][0] + other[1][0] > box[0][0]]
        if any(overlap(box, other) is not None for other in reaching):
            return False
        reaching.append(box)
    return True
