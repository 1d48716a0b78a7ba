"""A checkpoint's content outside of any run: its tensors stay in their files, and are read in blocks of rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.incremental.loading import open_checkpoint
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.checkpoint.plain_state import map_nested, plain_optimizer_state
from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges
from lightning_distrec.errors import CheckpointError


def read_contents(path: Path, pickles: bool = False) -> Loaded:
    """Read a checkpoint without its large tensors. Raises CheckpointError: see `StoredCheckpoint.contents`."""
    try:
        return open_checkpoint(path).contents(pickles)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:  # something in it is missing
        raise CheckpointError(
            f"{path} cannot be read, it is damaged or of another kind ({type(error).__name__}: {error})."
        ) from error


def verify(path: Path, on_progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """Read all of a checkpoint, and return what has changed since it was written, by its checksums.

    Loading does not check them: it reads the rows that a rank needs, and a checksum covers a full chunk of a table.
    Of a difference its base is read too. on_progress: called with the number of bytes read. Up to 64 MiB of a folder
    are in memory at once. The metadata have no checksum; they are compared with the files when they are loaded.
    Raises CheckpointError: it cannot be read, or is a file without checksums.
    """
    return sorted(open_checkpoint(path).changed_bytes(on_progress))


def read_full(path: Path, with_optimizers: bool, pickles: bool = False) -> dict[str, Any]:
    """Read a checkpoint's folder into memory, as stock Lightning has it.

    with_optimizers: also read the optimizers' state, which is 0 to 2 times as large as the weights; without, it is left
    out. pickles: whether it may hold any types, whose code is run. Raises CheckpointError: see `load`.
    """
    checkpoint = read_contents(path, pickles).checkpoint
    states = checkpoint.pop("optimizer_states", None)
    if states is not None:
        checkpoint["optimizer_states"] = [plain_optimizer_state(state) for state in states] if with_optimizers else []

    def read(value: Any, place: str) -> Any:
        return map_nested(materialized(value), place, read)

    full: dict[str, Any] = read(checkpoint, "")
    return full


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
