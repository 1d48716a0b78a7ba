"""What is in a checkpoint, for those who look at it or copy it outside of any run: its tensors stay in their file.

Nothing here knows how large a tensor is: what is read of it is read in pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.folders import read_marker
from lightning_distrec.checkpoint.load import as_whole, handle_of, load
from lightning_distrec.checkpoint.save import STATE_FILE
from lightning_distrec.checkpoint.skeleton import mapped, put_back, read_plain
from lightning_distrec.checkpoint.storage import StoredTensors
from lightning_distrec.chunks import Part, Whole, chunks
from lightning_distrec.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """A checkpoint without what ranks keep for themselves: their random generators and dataloaders."""

    checkpoint: dict[str, Any]
    """As Lightning has it; a bare state_dict is under "state_dict". Tensors are here, mapped, or handles."""
    marker: dict[str, Any] | None
    """What a folder says of itself; None for plain files."""


def read_contents(path: Path) -> Contents:
    """Read a checkpoint's folder, or a plain file, without its large tensors. Raises CheckpointError: see `load`."""
    try:
        return _read_folder(path) if path.is_dir() else Contents(load(path, rank=0, num_ranks=1).checkpoint, None)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:  # what should be in it is not
        raise CheckpointError(
            f"{path} cannot be read, it is damaged or of another kind ({type(error).__name__}: {error})."
        ) from error


def _read_folder(path: Path) -> Contents:
    marker = read_marker(path)
    tensors = StoredTensors(path)
    checkpoint = put_back(read_plain(path / STATE_FILE), lambda stand_in: handle_of(stand_in, path, tensors))
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path / STATE_FILE} is damaged: it holds a {type(checkpoint).__name__}.")
    return Contents(checkpoint, marker)


def tensors_of(value: Any) -> dict[str, Whole]:
    """Return the tensors in nested dicts, lists and tuples by their path, in order."""
    found: dict[str, Whole] = {}

    def look(item: Any, path: str) -> Any:
        whole = as_whole(item)
        if whole is not None:
            found[path] = whole
            return item
        return mapped(item, path, look)

    look(value, "")
    return found


def num_elements(whole: Whole) -> int:
    """Return the number of elements of a tensor."""
    return torch.Size(whole.shape).numel()


def num_bytes(whole: Whole) -> int:
    """Return the size of a tensor in bytes."""
    return num_elements(whole) * whole.dtype.itemsize


def pieces(whole: Whole, itemsize: int | None = None) -> Iterator[Tensor]:
    """Yield a tensor's rows in order, on the host and contiguous, CHUNK_BYTES or one row at a time.

    Each piece is overwritten by the next one. itemsize: what an element counts for in CHUNK_BYTES, at least its size.
    """
    shape = tuple(whole.shape)
    if not shape:
        number = torch.empty((), dtype=whole.dtype)
        whole.fill([Part((), number)])
        yield number
        return
    memory: Tensor | None = None
    for first, count in chunks(shape, itemsize or whole.dtype.itemsize) if num_elements(whole) else ():
        if memory is None:
            memory = torch.empty((count, *shape[1:]), dtype=whole.dtype)
        piece = memory[:count]
        whole.fill([Part((first, *[0] * (len(shape) - 1)), piece)])
        yield piece


def bytes_of(piece: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return piece.reshape(-1).view(torch.uint8).numpy().data
