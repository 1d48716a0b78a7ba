"""Full weights that are gathered from all ranks where user code reads a table that has gathered_weight=True."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec.sharding.weights.shard_of import ShardOf, without_guard
from lightning_distrec.sharding.weights.sums import is_in_step

Rectangle = tuple[int, int, int, int]
"""First row, first column, number of rows, number of columns."""


class Gathering:
    """Gathers the full weight of one table.

    shape: rows and columns of the table. rectangles: rank -> its shards with rows, in order.
    """

    _generation = 0

    def __init__(self, shape: tuple[int, int], rectangles: list[list[Rectangle]]) -> None:
        self.shape, self.rectangles = shape, rectangles
        self.num_elements = max(sum(rows * columns for *_, rows, columns in of_rank) for of_rank in rectangles)
        self._last: tuple[Any, Tensor] | None = None

    @classmethod
    def forget_all(cls) -> None:
        """Weights may have changed: gather them again when they are read next."""
        cls._generation += 1

    def full(self, values: Any) -> Tensor:
        """Collective, but for a second read in a step. Return the full table of which `values` is a shard.

        values: the guarded weight, or what was computed from it element by element.
        """
        of: ShardOf = values.of
        is_weight = any(values is weight for weight in of.weights)
        key = (self._generation, torch.is_grad_enabled())
        if is_weight and self._last is not None and self._last[0] == key:
            return self._last[1]
        with without_guard():
            if not is_weight and not of.alone:
                raise of.refusal("after an operation, on a table with several shards on a rank")
            weights = sorted(of.weights, key=lambda weight: (weight.of.row, weight.of.column))
            full: Tensor = _Gather.apply(self, *(weights if is_weight else [values.as_subclass(Tensor)]))
        # All ranks begin and end steps together, so that they agree about what is gathered once more.
        self._last = (key, full) if is_weight and is_in_step() else None
        return full


class _Gather(torch.autograd.Function):
    """Returns the full table; its gradient is averaged over the ranks, as DDP does, and scattered to the shards."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *shards: Tensor) -> Tensor:
        ctx.gathering, ctx.dtype = gathering, shards[0].dtype
        device, num_ranks = shards[0].device, len(gathering.rectangles)
        mine = torch.zeros(gathering.num_elements, dtype=ctx.dtype, device=device)
        _fill(mine, list(shards))
        everyone = torch.empty(num_ranks * gathering.num_elements, dtype=ctx.dtype, device=device)
        dist.all_gather_into_tensor(everyone, mine)
        full = torch.empty(gathering.shape, dtype=ctx.dtype, device=device)
        for rectangles, flat in zip(gathering.rectangles, everyone.chunk(num_ranks), strict=True):
            for (row, column, rows, columns), values in zip(rectangles, _parts(flat, rectangles), strict=True):
                full[row : row + rows, column : column + columns] = values
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Gathering.forget_all()  # the graph is freed; a second backward in the step needs another
        gathering: Gathering = ctx.gathering
        num_ranks = len(gathering.rectangles)
        everyone = torch.zeros(num_ranks * gathering.num_elements, dtype=ctx.dtype, device=gradient.device)
        for rectangles, flat in zip(gathering.rectangles, everyone.chunk(num_ranks), strict=True):
            _fill(flat, [gradient[r : r + rows, c : c + columns] for r, c, rows, columns in rectangles])
        mine = torch.empty(gathering.num_elements, dtype=ctx.dtype, device=gradient.device)
        dist.reduce_scatter_tensor(mine, everyone)
        mine /= num_ranks
        parts = _parts(mine, gathering.rectangles[dist.get_rank()])
        return None, *(parts or [mine[:0].view(0, gathering.shape[1])])  # a rank without rows has an empty shard


def _fill(flat: Tensor, blocks: list[Tensor]) -> None:
    begin = 0
    for block in blocks:
        flat[begin : begin + block.numel()] = block.reshape(-1)
        begin += block.numel()


def _parts(flat: Tensor, rectangles: list[Rectangle]) -> list[Tensor]:
    sizes = [rows * columns for *_, rows, columns in rectangles]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(rows, columns) for part, (*_, rows, columns) in zip(parts, rectangles, strict=True)]
