"""What is read of a sharded table over all ranks: sums, norms and the L2 term in a step, and gathered full weights."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.shard_access import GuardedTable, ShardPlace, SharedState, without_guard, write_back

SUMS = frozenset({"sum", "mean", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm"})
INPUTS, ORDERS = ("input", "self", "x"), ("p", "ord")
Rectangle = tuple[int, int, int, int]
"""First row, first column, number of rows, number of columns."""


def is_sum_in_step(place: ShardPlace, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is a sum or norm over all elements that every rank computes now."""
    options = {key for key, value in kwargs.items() if value not in (None, False)} - {*INPUTS, *ORDERS, "dtype"}
    is_single_weight = place.table.has_single_shards and place.kind == "weight"
    # Only in the user's step, which every rank runs: elsewhere one rank may ask alone, and would wait for the others.
    return place.table.state.in_step and is_single_weight and not options and len(args) <= 2


def sum_over_ranks(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Collective. Return the sum, mean or norm over all elements of a table, (), the same on every rank."""
    values = args[0] if args else next(kwargs[key] for key in INPUTS if key in kwargs)
    order = next((kwargs[key] for key in ORDERS if kwargs.get(key) is not None), args[1] if args[1:] else None)
    place: ShardPlace = values.place
    with without_guard():
        values = values.as_subclass(Tensor)
        if kwargs.get("dtype") is not None:
            values = values.to(kwargs["dtype"])
        if name in ("sum", "mean"):
            if order is not None:
                raise place.refusal(f"{name} over some dims")
            total: Tensor = _Sum.apply(values, place.table)
            return total if name == "sum" else total / (place.table.shape[0] * place.table.shape[1])
        power = 2.0 if order in (None, "fro") else order
        if not isinstance(power, (int, float)) or not 0 < power < float("inf"):
            raise place.refusal(f"the norm of order {order}")
        total = _Sum.apply(values.square() if power == 2.0 else values.abs().pow(power), place.table)
        # The gradient of a norm that is 0 is 0, as torch has it.
        return torch.where(total > 0, total, 1.0).pow(1.0 / power) * (total > 0)


class _Sum(torch.autograd.Function):
    """Returns the sum over the elements of all shards; the gradients are those of this rank's elements."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, table: GuardedTable) -> Tensor:
        ctx.shape, ctx.table = values.shape, table
        # In float64, so that the result hardly depends on how the table is sharded.
        total = values.sum(dtype=torch.float64)
        dist.all_reduce(total, group=table.state.group)
        return total.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # Ranks with unequal batches weight their losses, and the mean of all weights is 1; a shard has one rank's term.
        return (gradient / ctx.table.state.loss_weight).expand(ctx.shape), None


class Gathering:
    """Gathers the full weight of one table. rectangles: rank -> its shards with rows, in order."""

    def __init__(self, shape: tuple[int, int], rectangles: list[list[Rectangle]], state: SharedState) -> None:
        self.shape, self.rectangles, self.state = shape, rectangles, state
        self.num_elements = max(sum(rows * columns for *_, rows, columns in shards) for shards in rectangles)
        self._last: tuple[Any, Tensor] | None = None

    def full(self, values: Any) -> Tensor:
        """Collective, but for a second read in a step. Return the full table of which `values` is a shard."""
        table: GuardedTable = values.place.table
        is_weight = any(values is weight for weight in table.weights)
        # The grad mode too: what was gathered under no_grad has no graph, and a loss may read it next.
        key = (self.state.num_changes, torch.is_grad_enabled())
        if is_weight and self._last is not None and self._last[0] == key:
            return self._last[1]
        with without_guard():
            if not is_weight and not table.has_single_shards:
                raise values.place.refusal("after an operation, on a table with several shards on a rank")
            # By row and column, as `rectangles` are: ranks send values only, and know each other's order.
            weights = sorted(table.weights, key=lambda weight: (weight.place.row, weight.place.column))
            full: Tensor = _Gather.apply(self, *(weights if is_weight else [values.as_subclass(Tensor)]))
        # All ranks begin and end steps together, so that they agree about what is gathered once more.
        self._last = (key, full) if is_weight and self.state.in_step else None
        return full


class _Gather(torch.autograd.Function):
    """Returns the full table; its gradient is averaged over the ranks, as DDP does, and scattered to the shards."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *shards: Tensor) -> Tensor:
        ctx.gathering, num_ranks = gathering, len(gathering.rectangles)
        # As long as the largest rank's shards: all_gather_into_tensor takes equal sizes.
        local = shards[0].new_zeros(gathering.num_elements)
        local[: sum(shard.numel() for shard in shards)] = torch.cat([shard.reshape(-1) for shard in shards])
        gathered = local.new_empty(num_ranks * gathering.num_elements)
        dist.all_gather_into_tensor(gathered, local)
        full = local.new_empty(gathering.shape)
        for values, rectangles in zip(gathered.chunk(num_ranks), gathering.rectangles, strict=True):
            for index, shard in _shards(values, rectangles):
                full[index] = shard
        ctx.dtype = full.dtype
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gathering, num_ranks = ctx.gathering, len(ctx.gathering.rectangles)
        gathering.state.num_changes += 1  # the graph is freed; a second backward in the step needs another
        gradients = gradient.new_zeros(num_ranks * gathering.num_elements, dtype=ctx.dtype)
        for values, rectangles in zip(gradients.chunk(num_ranks), gathering.rectangles, strict=True):
            for index, shard in _shards(values, rectangles):
                shard.copy_(gradient[index])
        local = gradients.new_empty(gathering.num_elements)
        dist.reduce_scatter_tensor(local, gradients)
        local /= num_ranks
        shards = [shard for _, shard in _shards(local, gathering.rectangles[dist.get_rank()])]
        return None, *(shards or [local[:0].view(0, gathering.shape[1])])  # a rank without rows has an empty shard


def _shards(values: Tensor, rectangles: list[Rectangle]) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield the index in the full table and the values, as a view, of each shard of a rank."""
    begin = 0
    for row, column, rows, columns in rectangles:
        index = slice(row, row + rows), slice(column, column + columns)
        yield index, values[begin : begin + rows * columns].view(rows, columns)
        begin += rows * columns


def sharded_l2(module: nn.Module) -> Tensor:
    """Collective where tables are sharded. Return the sum of squares of the weights of all tables in `module`, ().

    module: an nn.Embedding, an nn.EmbeddingBag, a collection of torchrec's or one table of it, such as
    `self.tables.embedding_bags["user"]`, or a module that contains some. They may be sharded or not.
    The value is that of the full tables, the same on every rank; its gradients are those of this rank's shards. Its
    square root is their norm. A table with such a term moves in every row, which no update inside of backward does: set
    embedding_update="sparse" or "dense" for it.
    Raises ShardingError: there are no tables in `module`.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    unsharded = {
        id(p) for child in module.modules() if isinstance(child, kinds) for p in child.parameters(recurse=False)
    }
    sharded: list[Any] = [p for p in module.parameters() if hasattr(p, "place")]
    # DDP, or that of torchrec's data-parallel tables, averages the gradients of weights that every rank has.
    replicated = [
        p
        for p in module.parameters()
        if not hasattr(p, "place") and (id(p) in unsharded or isinstance(p, TableBatchedEmbeddingSlice))
    ]
    if not sharded and not replicated:
        raise ShardingError(f"sharded_l2: {type(module).__name__} has no embedding tables.")
    # Replicated weights need no all-reduce: every rank computes the same term.
    terms = [p.float().square().sum() for p in replicated]
    if sharded:
        # One function for the shards of all tables, and so one all-reduce.
        terms.append(_SumOfSquares.apply(sharded[0].place.table, *sharded))
    return torch.stack(terms).sum()


class _SumOfSquares(torch.autograd.Function):
    """Returns the sum of squares over the shards of all ranks; gradients are those of this rank's."""

    @staticmethod
    def forward(ctx: Any, table: GuardedTable, *weights: Tensor) -> Tensor:
        ctx.table = table
        write_back()
        # Saved by autograd, which then refuses a backward after the user's optimizer has written to them.
        ctx.save_for_backward(*weights)
        norms = [torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights]
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total, group=table.state.group)
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Ranks with unequal batches weight their losses, and the mean of all weights is 1; a shard has one rank's term.
        factor = 2.0 * gradient / ctx.table.state.loss_weight
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        return None, *[
            (factor * weight).to(weight.dtype) if needs else None for weight, needs in zip(weights, needed, strict=True)
        ]
