"""A checkpoint's content outside of any run: its tensors stay in their files, and are read in blocks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.atomic_folder import read_marker
from lightning_distrec.checkpoint.incremental.loading import with_base
from lightning_distrec.checkpoint.lazy_tensors import as_lazy, materialized, stored_tensor
from lightning_distrec.checkpoint.load import load
from lightning_distrec.checkpoint.plain_state import insert_tensors, map_nested, plain_optimizer_state, read_plain
from lightning_distrec.checkpoint.save import STATE_FILE
from lightning_distrec.checkpoint.storage import StoredTensors
from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges
from lightning_distrec.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """A checkpoint without the state of single ranks: their random generators and dataloaders."""

    checkpoint: dict[str, Any]
    """As Lightning has it; a bare state_dict is under "state_dict". Tensors are here, mapped, or handles."""
    marker: dict[str, Any] | None
    """The content of a folder's marker, or of a file's `EXTRA`; None for files of other programs."""


def read_contents(path: Path, pickles: bool = False) -> Contents:
    """Read a checkpoint's folder, or a plain file, without its large tensors. Raises CheckpointError: see `load`."""
    try:
        if path.is_dir():
            return _read_folder(path, pickles)
        loaded = load(path, 0, 1, pickles)
        return Contents(loaded.checkpoint, loaded.marker)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # something that should be in it is not
        raise CheckpointError(
            f"{path} cannot be read, it is damaged or of another kind ({type(error).__name__}: {error})."
        ) from error


def _read_folder(path: Path, pickles: bool) -> Contents:
    marker = read_marker(path)
    tensors = StoredTensors(path)
    checkpoint = insert_tensors(
        read_plain(path / STATE_FILE, pickles), lambda reference: stored_tensor(reference, path, tensors)
    )
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path / STATE_FILE} is damaged: it holds a {type(checkpoint).__name__}.")
    return Contents(with_base(path, checkpoint, marker, pickles), marker)


def read_full(path: Path, with_optimizers: bool, pickles: bool = False) -> dict[str, Any]:
    """Read a checkpoint's folder into memory, as stock Lightning has it.

    with_optimizers: also read the optimizers' state, which is 0 to 2 times as large as the weights; without, it is left
    out. pickles: whether it may hold any types, whose code is run. Raises CheckpointError: see `load`.
    """
    checkpoint = read_contents(path, pickles).checkpoint
    states = checkpoint.pop("optimizer_states", None)
    if states is not None:
        checkpoint["optimizer_states"] = [plain_optimizer_state(state) for state in states] if with_optimizers else []

    def read(value: Any, where: str) -> Any:
        return map_nested(materialized(value), where, read)

    full: dict[str, Any] = read(checkpoint, "")
    return full


def tensors_of(value: Any) -> dict[str, LazyTensor]:
    """Return the tensors in nested dicts, lists and tuples by their path, in order."""
    found: dict[str, LazyTensor] = {}

    def look(item: Any, path: str) -> Any:
        lazy = as_lazy(item)
        if lazy is not None:
            found[path] = lazy
            return item
        return map_nested(item, path, look)

    look(value, "")
    return found


def num_bytes(lazy: LazyTensor) -> int:
    """Return the size of a tensor in bytes."""
    return lazy.size().numel() * lazy.dtype.itemsize


def read_blocks(lazy: LazyTensor) -> Iterator[Tensor]:
    """Yield a tensor's rows in order, on the host and contiguous, BLOCK_BYTES or one row at a time.

    Each block is overwritten by the next one.
    """
    shape = tuple(lazy.shape)
    if not shape:
        number = torch.empty((), dtype=lazy.dtype)
        lazy.read_into([Chunk((), number)])
        yield number
        return
    memory: Tensor | None = None
    for first, count in row_ranges(shape, lazy.dtype.itemsize) if num_bytes(lazy) else ():
        if memory is None:
            memory = torch.empty((count, *shape[1:]), dtype=lazy.dtype)
        block = memory[:count]
        lazy.read_into([Chunk((first, *[0] * (len(shape) - 1)), block)])
        yield block


def bytes_of(block: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return block.reshape(-1).view(torch.uint8).numpy().data
