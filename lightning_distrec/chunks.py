"""Tensors that lie in parts on many ranks, on their way to a file and back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Most of a tensor that is read, written or sent at a time."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rectangle begins in a tensor, and its shape."""


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor that this rank holds."""

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    tensor: Tensor

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return self.offsets, tuple(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """A tensor whose parts are on several ranks; together they cover it, and nothing of it is on two of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]
    """Those of this rank; they share memory with what they were taken from."""

    def size(self) -> torch.Size:
        """Return the whole tensor's shape, as Tensor.size does."""
        return torch.Size(self.shape)

    def clone(self) -> "ChunkedTensor":
        """Return a copy with memory of its own."""
        return ChunkedTensor(
            self.shape, self.dtype, [Part(part.offsets, part.tensor.detach().clone()) for part in self.parts]
        )

    def fill(self, parts: Sequence[Part]) -> None:
        """Copy this rank's parts into `parts`, which lie in the same tensor. Raises ValueError: they are cut otherwise.

        No other rank is asked, so that every one of `parts` must be a part here.
        """
        mine = {part.box: part.tensor for part in self.parts}
        for part in parts:
            if part.box not in mine:
                raise ValueError("the tensor was cut otherwise when its parts were taken")
            with torch.no_grad():
                part.tensor.copy_(mine[part.box])


class Whole(Protocol):
    """A tensor in a file: nothing of it is in memory until it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's type."""

    def fill(self, parts: Sequence[Part]) -> None:
        """Read what lies in `parts`; what lies outside of the tensor in the file stays as it is."""

    def whole(self) -> Tensor:
        """Read and return the tensor, on the host."""


def chunks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the number of rows, of pieces of at most CHUNK_BYTES (or of one row)."""
    row_bytes = itemsize
    for size in shape[1:]:
        row_bytes *= size
    at_once = max(1, CHUNK_BYTES // max(1, row_bytes))
    for first in range(0, shape[0], at_once):
        yield first, min(at_once, shape[0] - first)


def overlap(a: Box, b: Box) -> Box | None:
    """Return where two rectangles of one tensor meet, or None."""
    first = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1], strict=True))
    shape = tuple(end - start for start, end in zip(first, ends, strict=True))
    return (first, shape) if all(size > 0 for size in shape) else None


def narrowed(tensor: Tensor, begin: Sequence[int], box: Box) -> Tensor:
    """Return the view of `tensor`, which begins at `begin` in a larger one, that lies in `box` of that one."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start - begin[dim], size)
    return tensor


def fill_from(tensor: Tensor, parts: Sequence[Part]) -> None:
    """Copy what `parts` overlap with of a whole tensor that this rank holds into them."""
    zero = (0,) * tensor.dim()
    for part in parts:
        if (box := overlap((zero, tuple(tensor.shape)), part.box)) is not None:
            with torch.no_grad():
                narrowed(part.tensor, part.offsets, box).copy_(narrowed(tensor, zero, box))
