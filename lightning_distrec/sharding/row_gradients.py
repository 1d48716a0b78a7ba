"""Gives sharded tables gradients, so that they are parameters like any other and the user's own
optimizer steps.

FBGEMM's training kernels update rows inside of backward and leave no gradient behind. Where that is
too early (loss scaling, accumulation, clipping, manual optimization) or not what the user's
optimizer does (Adam), the kernel looks rows up and no more. The gradient of its output is turned
into gradients of parameters that share the kernel's memory: sparse ones of the rows that were
looked up, as nn.Embedding(sparse=True) makes them, or dense ones of the full shard.

Tensor.coalesce, which sums gradients of rows that were looked up several times, asks the GPU how
many different rows there are, for each shard, in the middle of backward. On a GPU the rows are
sorted and counted in forward, and numbers that backward needs on the host are sent there without
waiting for them. Not run on a GPU yet.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightning_distrec import gpu
from lightning_distrec._compat.tensors import mark_coalesced
from lightning_distrec._compat.torch import versions_of
from lightning_distrec.errors import OptimizerError
from lightning_distrec.sharding.weights.shard_access import without_guard, without_guards

HALF = (torch.float16, torch.bfloat16)


class FeatureEnds:
    """The entries of a kernel's offsets, (num_features * batch_size + 1,), between its features."""

    def __init__(self, offsets: Tensor, num_features: int) -> None:
        self.bags = bags = (offsets.numel() - 1) // num_features
        # A slice: numbers of the host would be waited for.
        self.on_device = offsets[::bags] if bags else offsets.expand(num_features + 1)
        self.read = gpu.HostCopy(self.on_device).read
        """Returns them; waits for the GPU to come to the lookup, not for what comes after it."""


class RowSorter:
    """Sorts what one kernel looks up by shard and row. shard_of_feature: ascending. num_rows: of
    each shard."""

    def __init__(self, shard_of_feature: list[int], num_rows: list[int]) -> None:
        self.first_keys = [0, *accumulate(num_rows)]
        self.first_features = [
            bisect_left(shard_of_feature, shard) for shard in range(len(num_rows) + 1)
        ]
        self._feature_keys = torch.tensor([self.first_keys[shard] for shard in shard_of_feature])
        self._bounds = torch.tensor(self.first_features)

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first key of each feature's shard, and the first feature of each shard."""
        if self._bounds.device != device:  # once: numbers that come from the host are waited for
            self._bounds = self._bounds.to(device)
            self._feature_keys = self._feature_keys.to(device)
        return self._feature_keys, self._bounds


class SortedRows:
    """The rows of all shards of a kernel, one shard after the other. rows: (num_ids,), feature by
    feature."""

    def __init__(self, sorter: RowSorter, rows: Tensor, ends: FeatureEnds) -> None:
        self._sorter = sorter
        self._ends = ends
        first_keys, first_features = sorter.on_device(rows.device)
        lengths = ends.on_device.diff()
        # A shard's rows follow those of the shard before, so that one sort serves all shards. With
        # output_size given, repeat_interleave does not wait for the GPU.
        keys = rows.long() + first_keys.repeat_interleave(lengths, output_size=rows.numel())
        # Stable: gradients of one row are added up in the order of its ids, in every run.
        self._keys, self._order = keys.sort(stable=True)
        is_new = pad((self._keys[1:] != self._keys[:-1]).long(), (1, 0), value=1)
        # Sliced for a lookup of no ids, of which the padding alone is left.
        self._numbers = is_new[: rows.numel()].cumsum(0)
        """(num_ids,): how many different keys there are up to here."""
        before_shards = pad(self._numbers, (1, 0))[
            ends.on_device.index_select(0, first_features).long()
        ]
        # Sent in forward: backward reads it without waiting for what was queued in between.
        self._before_shards = gpu.HostCopy(before_shards)

    def sums(self, shard: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a shard, ascending, and the sum of `values`, (num_ids of the shard,
        dim), of each."""
        ends = self._ends.read()
        first_feature = self._sorter.first_features
        begin = ends[first_feature[shard]]
        end = ends[first_feature[shard + 1]]
        first_number, until = self._before_shards.read()[shard : shard + 2]
        numbers = torch.arange(first_number + 1, until + 1, device=values.device)
        starts = torch.searchsorted(self._numbers[begin:end], numbers)
        rows = self._keys[begin:end].index_select(0, starts) - self._sorter.first_keys[shard]
        in_order = values.index_select(0, self._order[begin:end] - begin)
        # unsafe: without checks of the offsets, for which the host would wait.
        sums = torch.segment_reduce(
            in_order, "sum", offsets=pad(starts, (0, 1), value=end - begin), axis=0, unsafe=True
        )
        return rows, sums


@dataclass(eq=False)
class LocalShard:
    """One shard of a table on this rank, as optimizers step on it."""

    table: str
    """The table's name in its collection."""
    weight: nn.Parameter
    """(num_rows, num_columns), a leaf that shares the kernel's memory; empty where this rank has no
    rows. Guarded from set-up on, for modules and optimizers hold it."""
    row: int = 0
    column: int = 0
    sparse: bool = True
    """Whether its gradient holds the rows that were looked up only."""
    replicated: bool = False
    """Whether the table is data-parallel: every rank has a replica, and gradients are averaged over
    the ranks."""
    used: set[str] | None = None
    """Names of the tables whose rows, of the current lookup, get a gradient on this rank; None: all
    do."""
    num_summed: int | None = None
    """How many different rows the gradient has that a lookup has just left here; None: there was
    one before."""
    on_reset: list[Callable[[torch.Tensor], Any]] = field(default_factory=list)
    """Called with the numbers of rows, counted from the first, that begin again because other ids
    have them now."""
    values: Tensor = field(init=False, repr=False)
    """What `weight` holds, as a plain tensor without a graph."""

    def __post_init__(self) -> None:
        self.values = self.weight.detach()


def local_shards_of(kernel: Any) -> list[LocalShard]:
    """Return the shards in the memory of an FBGEMM kernel, in its order; several where a table has
    column shards."""
    weights = kernel.split_embedding_weights()
    return [
        LocalShard(name, nn.Parameter(weight))
        for name, weight in zip(kernel.table_names, weights, strict=True)
    ]


def give_gradients(
    kernel: Any, shards: list[LocalShard], are_kept: Callable[[], bool] = lambda: True
) -> Any:
    """Let the kernel's lookups leave gradients on `shards`, those of `local_shards_of`, and update
    nothing.

    are_kept: whether they do; else the kernel updates its rows. It is asked in each lookup, and
    again in backward, so that it may have become true in between. Returns the handle of a hook.
    """
    assert kernel.weights_precision in (SparseType.FP32, SparseType.FP16)
    tables = list(kernel.feature_table_map)
    # Feature by feature: dims are those of the table (or column shard) that each feature looks up.
    dims = [kernel.embedding_specs[table][1] for table in tables]
    mode = kernel.pooling_mode
    layout = _Layout(tables, dims, mode != PoolingMode.NONE, mode == PoolingMode.MEAN, are_kept)
    is_ascending = tables == sorted(tables)
    sorter = RowSorter(tables, [len(shard.values) for shard in shards]) if is_ascending else None
    marked: list[Any] = []

    def looked_up(
        _: nn.Module, __: Any, arguments: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        ends = FeatureEnds(arguments["offsets"], len(tables))
        rows = arguments["indices"]
        sorted_rows = None
        learn_rows = are_kept() and any(s.sparse and s.weight.requires_grad for s in shards)
        if sorter is not None and learn_rows and gpu.is_on_gpu(rows):
            if not marked:
                marked.extend(
                    s.weight.register_post_accumulate_grad_hook(partial(_mark_summed, s))
                    for s in shards
                )
            sorted_rows = SortedRows(sorter, rows, ends)
        weights = arguments.get("per_sample_weights")
        ids = _Ids(rows, arguments["offsets"], weights, ends, sorted_rows)
        # The hook replaces the kernel's output: detached, so that FBGEMM's own backward, which
        # would update the rows, does not run; a leaf that requires a gradient, so that _Lookup's
        # backward does, even where no shard of this rank learns: other ranks' may, and the exchange
        # of gradients needs all ranks.
        leaf = output.detach().requires_grad_() if are_kept() else output
        parameters = [shard.weight for shard in shards]
        rows_or_bags: Tensor = _Lookup.apply(
            leaf, layout, ids, shards, shards[0].used, weights, *parameters
        )
        return rows_or_bags

    return kernel.register_forward_hook(looked_up, with_kwargs=True)


@without_guards
def _mark_summed(shard: LocalShard, weight: Tensor) -> None:
    """Let nobody sum by row again. Two lookups of one backward leave more rows than each: they are
    not marked."""
    if shard.num_summed is not None and weight.grad is not None:
        mark_coalesced(weight.grad, shard.num_summed)


@dataclass(frozen=True)
class _Layout:
    """The layout of a kernel's output."""

    tables: list[int]
    """Feature -> index of its table."""
    dims: list[int]
    """Feature -> number of columns."""
    pooled: bool
    mean: bool
    are_kept: Callable[[], bool]
    """Whether gradients are left on shards; see `give_gradients`."""


@dataclass(frozen=True)
class _Ids:
    """What a kernel was called with."""

    rows: Tensor
    """(num_ids,), feature by feature, bag by bag."""
    offsets: Tensor
    """(num_features * batch_size + 1,), where bags begin and end in `rows`."""
    weights: Tensor | None
    """(num_ids,)."""
    ends: FeatureEnds
    sorted_rows: SortedRows | None
    """The rows in order, on a GPU where sparse gradients are wanted."""


class _Lookup(torch.autograd.Function):
    """Returns a kernel's output, and in backward turns its gradient into gradients of the shards'
    weights.

    The weights of ids get theirs too, where they need one. All are inputs, so that autograd
    accumulates their gradients and runs their hooks as for any parameter.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, layout: _Layout, ids: _Ids, shards: list[LocalShard], *used: Any
    ) -> Tensor:
        """used: `LocalShard.used`, then the weights of ids and of shards."""
        ctx.layout = layout
        ctx.ids = ids
        ctx.shards = shards
        ctx.used = used[0]
        if ctx.needs_input_grad[5]:
            ctx.versions = _versions(shards)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    @without_guards
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.layout.are_kept():
            return gradient, *[None] * (len(ctx.needs_input_grad) - 1)
        needs_gradient = ctx.needs_input_grad[6:]
        weight_gradients = _weight_gradients(ctx, gradient) if ctx.needs_input_grad[5] else None
        row_gradients: dict[int, list[Any]] = {
            i: [] for i, needed in enumerate(needs_gradient) if needed
        }
        for table, rows, values in _row_gradients(ctx.layout, ctx.ids, gradient):
            if table in row_gradients:
                row_gradients[table].append((rows, values))
        shards: list[LocalShard] = ctx.shards
        gradients: list[Tensor | None] = [None] * len(shards)
        for i in row_gradients.keys() - _unused(shards, ctx.used, row_gradients):
            gradients[i] = _gradient(i, shards[i], row_gradients[i], ctx.ids.sorted_rows)
        return None, None, None, None, None, weight_gradients, *gradients


def _versions(shards: list[LocalShard]) -> list[int]:
    with without_guard():
        return versions_of([shard.weight for shard in shards if not shard.weight.is_inference()])


def _weight_gradients(ctx: Any, gradient: Tensor) -> Tensor:
    """Return the gradients of the ids' weights, (num_ids,). Raises OptimizerError: rows have
    changed since."""
    layout = ctx.layout
    ids = ctx.ids
    shards = ctx.shards
    # Of each the dot product of its row, which is read from the kernel's memory, and its bag's
    # gradient.
    if ctx.versions != _versions(shards):
        raise OptimizerError(
            "backward comes to a lookup whose ids have weights that need a gradient, after rows of "
            f"'{shards[0].table}' were updated. Call backward before the optimizer of the table "
            "steps."
        )
    products = []
    for table, rows, bag_gradients in _row_gradients(layout, replace(ids, weights=None), gradient):
        products.append((shards[table].weight.index_select(0, rows) * bag_gradients).sum(1))
    return torch.cat(products).to(ids.weights.dtype) if products else torch.zeros_like(ids.weights)


def _unused(
    shards: list[LocalShard],
    used: set[str] | None,
    row_gradients: dict[int, list[tuple[Tensor, Tensor]]],
) -> set[int]:
    """Return the shards whose rows went into no loss: optimizers must then skip the table, as
    unsharded."""
    # One backward serves all tables of a kernel, and yields zeros for tables whose rows were not
    # used.
    suspects = [] if used is None else [i for i in row_gradients if shards[i].table not in used]
    parts = [(i, values) for i in suspects for _, values in row_gradients[i]]
    if not parts:
        return set(suspects)
    # `used` is this rank's. Where another rank's code has used the rows, some gradient is not 0.
    are_used = torch.stack([values.any() for _, values in parts]).tolist()
    return set(suspects) - {i for (i, _), is_used in zip(parts, are_used, strict=True) if is_used}


def _row_gradients(
    layout: _Layout, ids: _Ids, gradient: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield feature by feature its table, the rows it looked up (num_ids,) and their gradients
    (num_ids, dim)."""
    num_bags = ids.ends.bags
    ends = ids.ends.read()
    bag_gradients = gradient.split(layout.dims, dim=1) if layout.pooled else None
    for feature, table in enumerate(layout.tables):
        start = ends[feature]
        end = ends[feature + 1]
        if start == end:
            continue
        if bag_gradients is None:
            yield table, ids.rows[start:end], gradient[start:end]
            continue
        lengths = ids.offsets[feature * num_bags : (feature + 1) * num_bags + 1].diff()
        bags = bag_gradients[feature]
        if layout.mean:
            # An empty bag has no ids for which it is repeated; 1 avoids a division by 0.
            bags = bags / lengths.clamp(min=1).unsqueeze(1)
        values = bags.repeat_interleave(lengths, dim=0, output_size=end - start)
        if ids.weights is not None:
            values = values * ids.weights[start:end].unsqueeze(1)
        yield table, ids.rows[start:end], values


def _gradient(
    number: int,
    shard: LocalShard,
    row_gradients: list[tuple[Tensor, Tensor]],
    sorted_rows: SortedRows | None,
) -> Tensor:
    weight = shard.weight
    if row_gradients:
        rows = torch.cat([rows for rows, _ in row_gradients]).long()
        values = torch.cat([values for _, values in row_gradients])
    else:
        # Other ranks may have looked up rows of the table: its optimizer must step on this shard
        # too.
        rows = torch.empty(0, dtype=torch.long, device=weight.device)
        values = torch.empty(0, weight.shape[1], device=weight.device)
    if not shard.sparse:
        # In the values' type, so that half precision rounds once, at the end.
        dense = torch.zeros(weight.shape, dtype=values.dtype, device=weight.device)
        return dense.index_add_(0, rows, values).to(weight.dtype)
    if sorted_rows is not None and row_gradients:
        rows, values = sorted_rows.sums(number, values)
        # Autograd adds it to a gradient that is there, and the sum may have a row twice.
        shard.num_summed = len(rows) if weight.grad is None else None
    else:
        summed = torch.sparse_coo_tensor(
            rows.unsqueeze(0), values, weight.shape, check_invariants=False
        ).coalesce()
        if weight.dtype not in HALF:
            return summed
        rows = summed.indices()[0]
        values = summed.values()
    # Summed in float32, because sums in half precision round at every row.
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0),
        values.to(weight.dtype),
        weight.shape,
        is_coalesced=True,
        check_invariants=False,
    )
