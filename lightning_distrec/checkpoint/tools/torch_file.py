"""Writes the file that torch.save would write, while only a block of each tensor is in memory at a time.

torch.save writes a file with holes in place of the tensors' bytes; its records are then copied into another zip
archive, in which the bytes take the place of the holes.
"""

import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.lazy_tensors import collect_tensors, read_blocks
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.chunks import LazyTensor, num_bytes
from lightning_distrec.errors import CheckpointError

_ALIGNMENT = 64
"""A tensor's bytes begin at a multiple of it, as in torch's own files: they are used where they are mapped."""
_HEADER_BYTES = 30 + 20
"""Of a record's header with sizes of 64 bits, without the name. Source: APPNOTE.TXT, 4.3.7 and 4.5.3."""


def write_torch_file(path: Path, value: Any, on_progress: Callable[[int], None]) -> None:
    """Write nested dicts, lists and tuples, whose tensors may be handles, for torch.load(weights_only=True).

    path: in a folder for temporary files. on_progress: called with numbers of bytes. Each tensor gets a storage.
    Raises CheckpointError: a tensor is not dense, or not in a dict, list or tuple; OSError.
    """
    tensors = collect_tensors(value)
    # torch names the records in an archive by the file, but for its suffix.
    skeleton = path.with_suffix(".skeleton")
    _write_skeleton(skeleton, value, tensors)
    with zipfile.ZipFile(skeleton) as source, zipfile.ZipFile(path, "w") as target:
        # torch numbers storages in the order in which it comes to them, and each tensor here has one of its own.
        records = {f"{path.stem}/data/{i}": lazy for i, lazy in enumerate(tensors.values())}
        sizes = {entry.filename: entry.file_size for entry in source.infolist() if "/data/" in entry.filename}
        # torch.save finds tensors inside of other objects as well; those would stay holes, full of zeros.
        if sizes != {name: num_bytes(lazy) for name, lazy in records.items()}:
            raise CheckpointError(
                "a tensor is inside of something other than dicts, lists and tuples. Return those from its state_dict."
            )
        for name in source.namelist():
            with target.open(_entry(name, target.start_dir), "w", force_zip64=True) as file:
                if name in records:
                    write_blocks(file, records[name], on_progress)
                else:
                    file.write(source.read(name))


def _write_skeleton(path: Path, value: Any, tensors: Mapping[str, LazyTensor]) -> None:
    """Let torch.save write all but the tensors' bytes.

    It wants real tensors: they are mapped from a sparse file, which takes neither memory nor disk.
    """
    hole = path.with_suffix(".hole")

    def put(item: Any, place: str) -> Any:
        return map_nested(item, place, put) if place not in tensors else _placeholder(hole, place, item, tensors[place])

    try:
        with torch.serialization.skip_data():
            torch.save(put(value, ""), path)
    except RuntimeError as error:  # torch's, where the file cannot be written
        raise OSError(f"{path.name}: {error}") from error


def _placeholder(hole: Path, place: str, item: Any, lazy: LazyTensor) -> Tensor:
    """Return a tensor of the same shape and type whose memory is never touched, so that it takes none."""
    if isinstance(item, Tensor) and (item.layout != torch.strided or item.is_quantized):
        raise CheckpointError(f"'{place}' has the layout {item.layout}, or is quantized. Make it dense.")
    if not (size := num_bytes(lazy)):
        return torch.empty(lazy.shape, dtype=lazy.dtype)
    memory = torch.from_file(str(hole), shared=True, size=size, dtype=torch.uint8)
    return memory.view(lazy.dtype).view(lazy.shape)


def _entry(name: str, begin: int) -> zipfile.ZipInfo:
    """Return a record whose header begins at `begin` of the file, and whose content is aligned, by an extra field."""
    entry = zipfile.ZipInfo(name)
    padding = -(begin + _HEADER_BYTES + len(name.encode()) + 4) % _ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return entry


def write_blocks(file: IO[bytes], lazy: LazyTensor, on_progress: Callable[[int], None]) -> None:
    """Write a tensor's bytes. A function of its own, so that no block of it is held while the next tensor is read."""
    for block in read_blocks(lazy):
        on_progress(file.write(block.reshape(-1).view(torch.uint8).numpy().data))
