"""What is read of sharded tables over all ranks: gathered full weights, and the L2 term of a
loss."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_distrec._compat.tensors import storage_key
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.weights.shard_access import (
    GuardedTable,
    Operation,
    Rectangle,
    SharedState,
    refuse_leaf,
    rewriting,
    without_guard,
    without_guards,
    write_back,
)
from lightning_distrec.sharding.weights.shard_operations import (
    first_of,
    is_guarded,
    is_in_place,
    mean_gradient,
)


def _num_elements(shards: list[Rectangle]) -> int:
    return sum(rows * columns for *_, rows, columns in shards)


class Gathering:
    """Gathers the full weight of one table. rectangles: rank -> its shards with rows, in order."""

    def __init__(
        self, shape: tuple[int, int], rectangles: list[list[Rectangle]], state: SharedState
    ) -> None:
        self.shape = shape
        self.rectangles = rectangles
        self.state = state
        self.num_elements = max(map(_num_elements, rectangles))
        self._last: tuple[Any, Tensor] | None = None

    def full(self, values: Any) -> Tensor:
        """Collective, but for a second read in a step. Return the full table of which `values` is a
        shard."""
        table = values.place.table
        is_weight = not values.place.is_computed
        # With the graph or without: what was gathered under no_grad has none, and a loss may read
        # it next.
        has_graph = torch.is_grad_enabled() and values.requires_grad
        key = (self.state.num_changes, has_graph)
        if is_weight and self._last is not None and self._last[0] == key:
            return self._last[1]
        with without_guard(), torch.set_grad_enabled(has_graph):
            if not is_weight and not table.has_single_shards:
                raise values.place.refusal(
                    "after an operation, on a table with several shards on a rank"
                )
            # By row and column, as `rectangles` are: ranks send values only, and know each other's
            # order.
            weights = sorted(
                table.weights, key=lambda weight: (weight.place.row, weight.place.column)
            )
            full: Tensor = _Gather.apply(
                self, *(weights if is_weight else [values.as_subclass(Tensor)])
            )
        # All ranks begin and end steps together, so that they agree about what is gathered once
        # more.
        self._last = (key, full) if is_weight and self.state.in_step else None
        return full

    def shards(self, values: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Yield the index in the full table and the values, as a view, of the shards of all
        ranks."""
        parts = values.chunk(len(self.rectangles))
        for part, rectangles in zip(parts, self.rectangles, strict=True):
            yield from _shards(part, rectangles)


class _Gather(torch.autograd.Function):
    """Returns the full table; its gradient is averaged over the ranks, as DDP does, and scattered
    to the shards."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *shards: Tensor) -> Tensor:
        ctx.gathering = gathering
        num_ranks = len(gathering.rectangles)
        # As long as the largest rank's shards: all_gather_into_tensor takes equal sizes.
        values = torch.cat([shard.reshape(-1) for shard in shards])
        local = pad(values, (0, gathering.num_elements - len(values)))
        gathered = local.new_empty(num_ranks * gathering.num_elements)
        dist.all_gather_into_tensor(gathered, local)
        full = local.new_empty(gathering.shape)
        for index, shard in gathering.shards(gathered):
            full[index] = shard
        ctx.dtype = full.dtype
        # Several reads of a step share it, and backward refuses what was written to in place, as to
        # a leaf's view.
        ctx.save_for_backward(full)
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gathering = ctx.gathering
        num_ranks = len(ctx.gathering.rectangles)
        _ = ctx.saved_tensors  # raises where they have changed
        # the graph is freed; a second backward in the step needs another
        gathering.state.num_changes += 1
        gradients = gradient.new_zeros(num_ranks * gathering.num_elements, dtype=ctx.dtype)
        for index, shard in gathering.shards(gradients):
            shard.copy_(gradient[index])
        local = gradients.new_empty(gathering.num_elements)
        dist.reduce_scatter_tensor(local, gradients)
        local /= num_ranks
        shards = [shard for _, shard in _shards(local, gathering.rectangles[dist.get_rank()])]
        # a rank without rows has an empty shard
        return None, *(shards or [local[:0].view(0, gathering.shape[1])])


def _shards(
    values: Tensor, rectangles: list[Rectangle]
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield the index in the full table and the values, as a view, of each shard of a rank."""
    begin = 0
    for row, column, rows, columns in rectangles:
        index = slice(row, row + rows), slice(column, column + columns)
        yield index, values[begin : begin + rows * columns].view(rows, columns)
        begin += rows * columns


def call_on_full(func: Operation, args: Any, kwargs: Any) -> Any:
    """Collective. Call a function of torch with gathered weights in the places of shards.

    What is written in place to a weight, or to a view of it that was returned, is written to the
    shards.
    """
    target = first_of(args)
    fulls = dict[int, Tensor]()
    is_written = is_guarded(target) and _writes(func.__name__)
    if is_written:
        if target.place.is_computed:
            raise target.place.refusal(f"{func.__name__} on what was computed of it")
        with without_guard():
            refuse_leaf(target)
    args, kwargs = apply_to_collection([args, kwargs], Tensor, _gathered, fulls)
    result = func(*args, **kwargs)
    if is_written:
        write_shards(fulls[id(target)], target.place.table)
        return None if result is None else target
    if id(target) in fulls and not target.place.is_computed:
        return _view(result, fulls[id(target)], target.place.table)
    return result


def _writes(name: str) -> bool:
    return is_in_place(name) or name == "__setitem__"


def _gathered(value: Any, fulls: dict[int, Tensor]) -> Tensor:
    """Return the full table in the place of a shard, and other tensors as they are. fulls: id of a
    shard -> table."""
    if not is_guarded(value):
        return value  # type: ignore[no-any-return]
    table: GuardedTable = value.place.table
    if table.gathering is None or value.place.kind != "weight":
        raise value.place.refusal("together with a gathered weight")
    if id(value) not in fulls:
        fulls[id(value)] = table.gathering.full(value)
    return fulls[id(value)]


def write_shards(full: Tensor, table: GuardedTable) -> None:
    """Copy to this rank's shards what user code has written to the full table."""
    with without_guard(), torch.no_grad(), rewriting():
        for weight in table.weights:
            weight.copy_(weight.place.narrow(full))
    table.weights[0].place.note_write()
    table.state.num_changes += 1


class FullView(Tensor):
    """A view of a gathered weight without a graph. What is written to it in place is written to the
    shards."""

    full: Tensor
    table: GuardedTable

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        view = first_of(args)
        if name in ("__reduce_ex__", "__deepcopy__") and isinstance(view, FullView):
            return func(view.as_subclass(Tensor), *args[1:], **(kwargs or {}))
        with without_guard():
            result = func(*args, **(kwargs or {}))
        if not isinstance(view, FullView):
            return result
        if _writes(name):
            write_shards(view.full, view.table)
            return result
        return _view(result, view.full, view.table)


def _view(result: Any, full: Tensor, table: GuardedTable) -> Any:
    """Return what was read of a full table; as a FullView where it shares its memory."""
    if (
        not isinstance(result, Tensor)
        or isinstance(result, FullView)
        or result.layout != torch.strided
    ):
        return result
    if result.requires_grad or storage_key(result) != storage_key(full):
        return result
    view = result.as_subclass(FullView)
    view.full = full
    view.table = table
    return view


def sharded_l2(module: nn.Module) -> Tensor:
    """Collective where tables are sharded. Return the sum of squares of the weights of all tables
    in `module`, ().

    module: an nn.Embedding, an nn.EmbeddingBag, a collection of torchrec's or one table of it, such
    as `self.tables.embedding_bags["user"]`, or a module that contains some. They may be sharded or
    not.
    The value is that of the full tables, the same on every rank; its gradients are those of this
    rank's shards. Its square root is their norm. A table with such a term moves in every row, which
    no update inside of backward does: the first step with it lets the optimizer step on the shards.
    A term that begins later raises OptimizerError: set embedding_update="sparse" or "dense".
    Raises ShardingError: there are no tables in `module`.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = [child for child in module.modules() if isinstance(child, kinds)]
    unsharded = {id(p) for child in embeddings for p in child.parameters(recurse=False)}
    sharded: list[Any] = []
    # DDP, or that of torchrec's data-parallel tables, averages the gradients of weights that every
    # rank has.
    replicated = []
    for p in module.parameters():
        if hasattr(p, "place"):
            sharded.append(p)
            if torch.is_grad_enabled():
                p.place.table.state.before_full_gradient(p.place.table.name)
        elif id(p) in unsharded or isinstance(p, TableBatchedEmbeddingSlice):
            replicated.append(p)
    if not sharded and not replicated:
        raise ShardingError(f"sharded_l2: {type(module).__name__} has no embedding tables.")
    # Replicated weights need no all-reduce: every rank computes the same term.
    terms = [p.float().square().sum() for p in replicated]
    if sharded:
        # One function for the shards of all tables, and so one all-reduce.
        terms.append(_SumOfSquares.apply(sharded[0].place.table, *sharded))
    return torch.stack(terms).sum()


class _SumOfSquares(torch.autograd.Function):
    """Returns the sum of squares over the shards of all ranks; gradients are those of this
    rank's."""

    @staticmethod
    @without_guards
    def forward(ctx: Any, table: GuardedTable, *weights: Tensor) -> Tensor:
        ctx.table = table
        write_back()
        # Saved by autograd, which then refuses a backward after the user's optimizer has written to
        # them.
        ctx.save_for_backward(*weights)
        norms = [torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights]
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total, group=table.state.group)
        return total.float()

    @staticmethod
    @once_differentiable
    @without_guards
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = 2.0 * mean_gradient(gradient, ctx.table.state)
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        return None, *[
            (factor * weight).to(weight.dtype) if needs else None
            for weight, needs in zip(weights, needed, strict=True)
        ]
