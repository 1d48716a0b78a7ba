"""Tensors whose chunks lie on many ranks, on their way to a file and back.

A chunk is a rectangle of a tensor: one that a rank holds, or one that a file has. A rank's shards
are not pickled: whoever loads the pickle would lack the rows of the other ranks, without an error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_distrec.errors import ShardingError

BLOCK_BYTES = 64 * 2**20
"""How much of a tensor is read, written or sent at a time, at most."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rectangle begins in a tensor, and its shape."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor that this rank holds."""

    offsets: tuple[int, ...]
    """Where it begins in the full tensor."""
    tensor: Tensor

    @property
    def box(self) -> Box:
        """Where it lies in the full tensor."""
        return self.offsets, tuple(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """A tensor whose chunks are on several ranks; together they cover it, and no two of them
    overlap."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]
    """Those of this rank; they share memory with what they were taken from."""

    def size(self) -> torch.Size:
        """Return the full tensor's shape, as Tensor.size does."""
        return torch.Size(self.shape)

    def clone(self) -> "ChunkedTensor":
        """Return a copy with memory of its own."""
        copies = [Chunk(chunk.offsets, chunk.tensor.detach().clone()) for chunk in self.chunks]
        return ChunkedTensor(self.shape, self.dtype, copies)

    def read_into(self, chunks: Sequence[Chunk]) -> None:
        """Copy this rank's chunks into `chunks` of the same tensor. Raises ValueError: they are
        other rectangles."""
        # No other rank is asked, so that every one of `chunks` must be a chunk here.
        local_chunks = {chunk.box: chunk.tensor for chunk in self.chunks}
        for chunk in chunks:
            if chunk.box not in local_chunks:
                raise ValueError("the tensor was sharded differently when it was saved")
            with torch.no_grad():
                chunk.tensor.copy_(local_chunks[chunk.box])


class LazyTensor:
    """A tensor in a file: nothing of it is in memory until it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def size(self) -> torch.Size:
        """Return the shape, as Tensor.size does."""
        return torch.Size(self.shape)

    def read_into(self, chunks: Sequence[Chunk]) -> None:
        """Read the rectangles of `chunks`; what lies outside of the tensor in the file stays as it
        is."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Read and return the full tensor, on the host."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into([Chunk((0,) * len(self.shape), tensor)])
        return tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyTensor":
        return self  # Lightning's WeightAveraging copies whole states before it loads them


def num_bytes(tensor: ChunkedTensor | LazyTensor) -> int:
    """Return the bytes of the full tensor."""
    return tensor.size().numel() * tensor.dtype.itemsize


def row_ranges(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the number of rows, of blocks of at most BLOCK_BYTES (or of one
    row)."""
    row_bytes = itemsize * math.prod(shape[1:])
    at_once = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, shape[0], at_once):
        yield first, min(at_once, shape[0] - first)


def overlap(a: Box, b: Box) -> Box | None:
    """Return where two rectangles of one tensor meet, or None."""
    first = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1], strict=True))
    shape = tuple(end - start for start, end in zip(first, ends, strict=True))
    return (first, shape) if all(size > 0 for size in shape) else None


def narrowed(tensor: Tensor, begin: Sequence[int], box: Box) -> Tensor:
    """Return the view of `tensor`, which begins at `begin` in a larger one, that lies in `box` of
    that one."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start - begin[dim], size)
    return tensor


def copy_into(chunks: Sequence[Chunk], tensor: Tensor) -> None:
    """Copy a full tensor's rectangles into `chunks`; what lies outside of the tensor stays as it
    is."""
    zero = (0,) * tensor.dim()
    for chunk in chunks:
        box = overlap((zero, tuple(tensor.shape)), chunk.box)
        if box is not None:
            with torch.no_grad():
                narrowed(chunk.tensor, chunk.offsets, box).copy_(narrowed(tensor, zero, box))


WAYS_OUT = (
    "Call trainer.strategy.full_state_dict() on every rank, and save what rank 0 gets; "
    "trainer.save_checkpoint; or, after the run, trainer.strategy.unshard() on every rank, which "
    "turns the module back into an ordinary one."
)


def refuse_pickling(shard: Any, name: str) -> Any:
    """Let pickle, and so torch.save, raise ShardingError for this tensor. name: whose shard it is,
    for the message."""
    # pickle looks __reduce_ex__ up on the object, so that neither the tensor's class nor its copies
    # change.
    shard.__reduce_ex__ = partial(_refuse, name)
    return shard


def _refuse(name: str, _protocol: Any) -> NoReturn:
    raise ShardingError(
        f"'{name}' was pickled (by torch.save, say), and this rank has only a shard of it. "
        f"{WAYS_OUT}"
    )


def refuse_module(action: str, path: str, *_: Any) -> NoReturn:
    """Raise ShardingError. action: what was tried with a module that holds shards at `path`."""
    raise ShardingError(
        f"a sharded module cannot be {action}: this rank has only shards of '{path}'. {WAYS_OUT}"
    )
