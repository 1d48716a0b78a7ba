"""Writes the file that torch.save would write, while only a block of each tensor is in memory at a time.

torch.save itself writes the file, with holes in place of the tensors' bytes. The bytes are written into the holes
afterwards, and their checksums to where a zip archive keeps them.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.lazy_tensors import as_lazy, collect_tensors, read_blocks
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.chunks import LazyTensor, num_bytes
from lightning_distrec.errors import CheckpointError

_HEADER = struct.Struct("<26xHH")
"""Header of a record of a zip archive: the lengths of its name and of its extra field, which follow."""
_DESCRIPTOR = struct.Struct("<4sI")
"""Beginning of the descriptor behind a record: a mark, and the checksum."""
_ENTRY = struct.Struct("<28xHHH12x")
"""A record's entry in the directory at the end: the lengths of its name, extra field and comment, which follow."""
_CHECKSUM_IN_ENTRY = 16
"""Where in an entry the checksum is. Source: APPNOTE.TXT, 4.3.7 to 4.3.12."""


def write_torch_file(path: Path, value: Any, on_progress: Callable[[int], None]) -> None:
    """Write nested dicts, lists and tuples, whose tensors may be handles, for torch.load(weights_only=True).

    path: in a folder for temporary files. on_progress: called with the number of bytes written. Each tensor gets
    storage of its own, even if two names share one.
    Raises CheckpointError: a tensor is not dense, or not in a dict, list or tuple; OSError.
    """
    tensors = collect_tensors(value)
    _write_without_bytes(path, value, tensors)
    records = _records(path)
    in_order = _order_by_file(path, tensors)
    # torch.save finds tensors inside of other objects as well; those would stay holes, full of zeros.
    if [size for _, size in records] != [num_bytes(lazy) for lazy in in_order]:
        raise CheckpointError(
            f"torch.save wrote {len(records)} tensors, but {len(in_order)} were found: one is inside of something "
            "other than dicts, lists and tuples. Return those from the state_dict that it comes from."
        )
    with open(path, "r+b") as file:
        checksums = {
            header: _write_record(file, header, lazy, on_progress)
            for (header, _), lazy in zip(records, in_order, strict=True)
        }
        _write_directory(file, path, checksums)


def _write_without_bytes(path: Path, value: Any, tensors: dict[str, LazyTensor]) -> None:
    """Let torch.save write all but the tensors' bytes.

    torch.save wants real tensors: they are mapped from a sparse file, whose pages nobody touches, so that they take
    neither memory nor disk.
    """
    hole = path.with_name("hole")

    def put(item: Any, place: str) -> Any:
        return (
            map_nested(item, place, put) if as_lazy(item) is None else _placeholder(hole, place, item, tensors[place])
        )

    try:
        with torch.serialization.skip_data():
            torch.save(put(value, ""), path)
    except RuntimeError as error:  # torch's, where the file cannot be written
        raise OSError(f"{path.name}: {error}") from error
    finally:
        hole.unlink(missing_ok=True)


def _placeholder(hole: Path, place: str, item: Any, lazy: LazyTensor) -> Tensor:
    """Return a tensor of the same shape and type whose memory is never touched, so that it takes none."""
    if isinstance(item, Tensor) and (item.layout != torch.strided or item.is_quantized):
        raise CheckpointError(
            f"'{place}' has the layout {item.layout}, or is quantized, and only dense tensors can be exported. "
            "Make it dense."
        )
    if not (size := num_bytes(lazy)):
        return torch.empty(lazy.shape, dtype=lazy.dtype)
    memory = torch.from_file(str(hole), shared=True, size=size, dtype=torch.uint8)
    return memory.view(lazy.dtype).view(lazy.shape)


def _records(path: Path) -> list[tuple[int, int]]:
    """Return offset of the header, and number of bytes, of each tensor that is not empty, in the file's order."""
    with zipfile.ZipFile(path) as archive:
        # Empty tensors have no bytes to write, and no address to be found by.
        records = [(i.header_offset, i.file_size) for i in archive.infolist() if "/data/" in i.filename and i.file_size]
    return sorted(records)


def _order_by_file(path: Path, tensors: dict[str, LazyTensor]) -> list[LazyTensor]:
    """Return the tensors that are not empty, in the file's order.

    Only torch knows which record belongs to which tensor. It maps the file as one block of memory, so that the
    addresses of the loaded tensors are in the order of the records.
    """
    written = collect_tensors(torch.load(path, weights_only=True, mmap=True))
    addresses = {name: written[name].read().data_ptr() for name, lazy in tensors.items() if num_bytes(lazy)}
    return [tensors[name] for name in sorted(addresses, key=addresses.__getitem__)]


def _write_record(file: IO[bytes], header: int, lazy: LazyTensor, on_progress: Callable[[int], None]) -> int:
    """Write a tensor's bytes, and behind them their checksum, which is returned."""
    file.seek(header)
    # Past the name and the extra field, with which torch aligns a tensor's bytes.
    file.seek(sum(_HEADER.unpack(file.read(_HEADER.size))), 1)
    checksum = 0
    for block in read_blocks(lazy):
        content = block_bytes(block)
        file.write(content)
        checksum = zlib.crc32(content, checksum)
        on_progress(len(content))
    end = file.tell()
    # torch.save has not seen the bytes: the checksum that it wrote behind the record is replaced.
    mark, _ = _DESCRIPTOR.unpack(file.read(_DESCRIPTOR.size))
    file.seek(end)
    file.write(_DESCRIPTOR.pack(mark, checksum))
    return checksum


def _write_directory(file: IO[bytes], path: Path, checksums: dict[int, int]) -> None:
    """Write checksums into the directory at the end of the file. checksums: by offset of the record's header."""
    with zipfile.ZipFile(path) as archive:
        entries, begin = archive.infolist(), archive.start_dir
    for entry in entries:
        file.seek(begin)
        # Entries differ in length: each one shows where the next one begins.
        lengths = _ENTRY.unpack(file.read(_ENTRY.size))
        if entry.header_offset in checksums:
            file.seek(begin + _CHECKSUM_IN_ENTRY)
            file.write(struct.pack("<I", checksums[entry.header_offset]))
        begin += _ENTRY.size + sum(lengths)


def block_bytes(block: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return block.reshape(-1).view(torch.uint8).numpy().data
