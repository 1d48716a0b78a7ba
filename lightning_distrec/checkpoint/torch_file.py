"""Writes the file that torch.save would write, from tensors that are never in memory as a whole.

torch writes the file without the tensors' bytes, which leaves holes in it. The bytes go into the holes, and their
checksums to where a zip archive keeps them.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.contents import bytes_of, num_bytes, pieces, tensors_of
from lightning_distrec.checkpoint.load import as_whole
from lightning_distrec.checkpoint.skeleton import mapped
from lightning_distrec.chunks import Whole
from lightning_distrec.errors import CheckpointError

_HEADER = struct.Struct("<26xHH")
"""What stands before a record of a zip archive: the lengths of its name and of its extra field, which follow."""
_DESCRIPTOR = struct.Struct("<4sI")
"""How what stands behind a record begins: a mark, and the checksum."""
_ENTRY = struct.Struct("<28xHHH12x")
"""A record's entry in the directory at the end: the lengths of its name, extra field and comment, which follow."""
_CHECKSUM_IN_ENTRY = 16
"""Where in an entry the checksum is. Source: APPNOTE.TXT, 4.3.7 to 4.3.12."""


def write_torch_file(path: Path, value: Any, told: Callable[[int], None]) -> None:
    """Write nested dicts, lists and tuples, whose tensors may be handles, for torch.load(weights_only=True).

    path: in a folder for temporary files. told: called with the number of bytes that were written. Each tensor gets
    memory of its own, also where two names led to the same one.
    Raises CheckpointError: a tensor is not dense, or inside of something other than dicts, lists and tuples; OSError.
    """
    wholes = tensors_of(value)
    _write_without_bytes(path, value, wholes)
    records = _records(path)
    in_order = _in_order_of_file(path, wholes)
    if [size for _, size in records] != [num_bytes(whole) for whole in in_order]:
        raise CheckpointError(
            f"{len(records)} tensors would be written and {len(in_order)} are known: one is inside of something other "
            "than dicts, lists and tuples. Let the state_dict that it comes from give those."
        )
    with open(path, "r+b") as file:
        checksums = {
            header: _write_record(file, header, whole, told)
            for (header, _), whole in zip(records, in_order, strict=True)
        }
        _write_directory(file, path, checksums)


def _write_without_bytes(path: Path, value: Any, wholes: dict[str, Whole]) -> None:
    """Let torch.save write all but the tensors' bytes. The tensors that it sees are mapped from one more hole."""
    hole = path.with_name("hole")

    def put(item: Any, where: str) -> Any:
        return mapped(item, where, put) if as_whole(item) is None else _stand_in(hole, where, item, wholes[where])

    try:
        with torch.serialization.skip_data():
            torch.save(put(value, ""), path)
    except RuntimeError as error:  # torch's, where the file cannot be written
        raise OSError(f"{path.name}: {error}") from error
    finally:
        hole.unlink(missing_ok=True)


def _stand_in(hole: Path, where: str, item: Any, whole: Whole) -> Tensor:
    """Return a tensor like `whole` whose memory is never touched, so that it takes none."""
    if isinstance(item, Tensor) and (item.layout != torch.strided or item.is_quantized):
        raise CheckpointError(
            f"'{where}' is a tensor of layout {item.layout}, quantized or not, and only dense ones are exported. "
            "Make it dense."
        )
    if not (size := num_bytes(whole)):
        return torch.empty(whole.shape, dtype=whole.dtype)
    memory = torch.from_file(str(hole), shared=True, size=size, dtype=torch.uint8)
    return memory.view(whole.dtype).view(whole.shape)


def _records(path: Path) -> list[tuple[int, int]]:
    """Return, in the file's order, where the headers of tensors are that have bytes, and how many bytes."""
    with zipfile.ZipFile(path) as archive:
        found = [(i.header_offset, i.file_size) for i in archive.infolist() if "/data/" in i.filename and i.file_size]
    return sorted(found)


def _in_order_of_file(path: Path, wholes: dict[str, Whole]) -> list[Whole]:
    """Return the tensors that have bytes, in the order in which the file has them.

    Which record is whose only torch knows; but it maps the file as one piece of memory, where places can be compared.
    """
    written = tensors_of(torch.load(path, weights_only=True, mmap=True))
    places = {name: written[name].whole().data_ptr() for name, whole in wholes.items() if num_bytes(whole)}
    return [wholes[name] for name in sorted(places, key=places.__getitem__)]


def _write_record(file: IO[bytes], header: int, whole: Whole, told: Callable[[int], None]) -> int:
    """Write a tensor's bytes, and behind them their checksum; returns it."""
    file.seek(header)
    file.seek(sum(_HEADER.unpack(file.read(_HEADER.size))), 1)
    checksum = 0
    for piece in pieces(whole):
        content = bytes_of(piece)
        file.write(content)
        checksum = zlib.crc32(content, checksum)
        told(len(content))
    where = file.tell()
    mark, _ = _DESCRIPTOR.unpack(file.read(_DESCRIPTOR.size))
    file.seek(where)
    file.write(_DESCRIPTOR.pack(mark, checksum))
    return checksum


def _write_directory(file: IO[bytes], path: Path, checksums: dict[int, int]) -> None:
    """Write the checksums, by where the records' headers are, into the directory at the end of the file."""
    with zipfile.ZipFile(path) as archive:
        entries, begin = archive.infolist(), archive.start_dir
    for entry in entries:
        file.seek(begin)
        lengths = _ENTRY.unpack(file.read(_ENTRY.size))
        if entry.header_offset in checksums:
            file.seek(begin + _CHECKSUM_IN_ENTRY)
            file.write(struct.pack("<I", checksums[entry.header_offset]))
        begin += _ENTRY.size + sum(lengths)
