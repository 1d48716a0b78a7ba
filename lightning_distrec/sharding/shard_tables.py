"""Shards tables: makes torchrec's sharded modules, brings rows and id mappings to them, and puts
proxies in place."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.types import ShardedModule, ShardedTensor

from lightning_distrec._compat.fbgemm import fbgemm_kernels
from lightning_distrec._compat.torch import use_foreach_for
from lightning_distrec._compat.torchrec_modules import (
    attach_fused_optimizer,
    detach_fused_optimizer,
    free_unsharded_tables,
    free_weights,
    keep_rows_undrawn,
    silence_torchrec,
)
from lightning_distrec.chunks import refuse_pickling
from lightning_distrec.host_memory import release_pages
from lightning_distrec.sharding.held_mappings import hold_mappings
from lightning_distrec.sharding.initial_weights import (
    TableShard,
    chunks_of,
    copy_from_full,
    init_rows,
    redistribute,
    sharded_weights,
    table_shards,
)
from lightning_distrec.sharding.meta_weight import stop_recording
from lightning_distrec.sharding.proxies import ProxyWeight, ShardedProxy, make_proxy
from lightning_distrec.sharding.row_gradients import LocalShard, local_shards_of
from lightning_distrec.sharding.scores.lazy_scores import score
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.sharders import QuantizedComms, ShardingByTable, sharder_of
from lightning_distrec.sharding.sharding_groups import ShardingGroups
from lightning_distrec.sharding.tables import Table
from lightning_distrec.sharding.weights.collective_reads import Gathering
from lightning_distrec.sharding.weights.shard_access import (
    GuardedTable,
    rewriting,
    watch_caches,
    without_guards,
)
from lightning_distrec.sharding.weights.shard_weight import guard

FusedArguments = Mapping[str, tuple[dict[str, Any], str]]
"""Full name of a table -> FBGEMM's arguments for its in-backward optimizer, and the label of its
param group; tables of one label share a kernel."""


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """Shards the tables of a module by a plan."""

    root: nn.Module
    tables: list[Table]
    plan: ShardingByTable
    """Counts ranks within a group."""
    fused: FusedArguments
    """For every table that is not data_parallel."""
    device: torch.device
    rows: dict[str, list[TableShard]]
    """Full name -> where its rows are: in an earlier sharding, or in rank 0's unsharded weight
    (`detach_rows`), as DDP would have it. Other tables were built on meta and get new rows by
    `seed`. A table leaves the dict once its shards are filled, so that its rows are freed."""
    seed: int
    comms: QuantizedComms
    gathered: Set[str]
    """Tables whose full weight user code may read."""
    groups: ShardingGroups
    earlier: ShardedTables | None = None
    """The sharding whose mappings of ids go on."""

    def shard(self) -> ShardedTables:
        """Collective. Shard the tables by the plan, and bring their rows to the shards."""
        tables = self.tables
        device = self.device
        for table in tables:
            stop_recording(table.parameter)
        # torchrec initialises shards, a different number of draws on each rank; the user's
        # generators must stay alike.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            sharded = self._sharded_modules()
        result = ShardedTables(self.root, tables, self.plan, sharded, self.groups)
        for path, module in sharded.items():
            kernels = [(kernel, local_shards_of(kernel)) for kernel in fbgemm_kernels(module)]
            result.kernels += kernels
            watch_caches(kernel for kernel, _ in kernels)
            shards = [shard for _, kernel_shards in kernels for shard in kernel_shards]
            result.shards |= _shards_by_table(module, result.tables_of(path), shards, device)
            result.proxies[path] = _proxy(result, path)
        tables_by_name = {table.full_name: table for table in tables}
        for name, all_shards in result.table_shards().items():
            _set_offsets(result.shards[name], all_shards)
            _guard(result, tables_by_name[name], all_shards, name in self.gathered)
            for shard in result.shards[name]:
                if not shard.replicated:
                    refuse_pickling(shard.weight, name)
        # After the shards have places: a mapping has the rows of its shard, and initial rows are
        # gathered from shards.
        hold_mappings(result, self.earlier)
        for table in tables:
            free_weights(table.module)  # those built on meta, too
        result.put_proxies_back()
        return result

    def _sharded_modules(self) -> dict[str, ShardedModule]:
        environment = self.groups.environment()
        sharded: dict[str, ShardedModule] = {}
        for path in dict.fromkeys(table.collection for table in self.tables):
            tables = [table for table in self.tables if table.collection == path]
            for table in tables:
                if table.full_name in self.fused:
                    attach_fused_optimizer(table.parameter, *self.fused[table.full_name])
            parameter_sharding = {table.name: self.plan[table.full_name] for table in tables}
            sharder = sharder_of(tables[0], self.comms)
            # _bring_rows fills all of them
            with silence_torchrec(), keep_rows_undrawn(release_pages):
                sharded[path] = sharder.shard(
                    tables[0].module, parameter_sharding, environment, self.device, path
                )
            free_unsharded_tables(sharded[path])
            for table in tables:
                detach_fused_optimizer(table.parameter)
            # Collection by collection: one's rows are freed before the next one's shards are made.
            self._bring_rows(sharded[path], tables)
        return sharded

    def _bring_rows(self, sharded: ShardedModule, tables: list[Table]) -> None:
        weights = sharded_weights(sharded, tables)
        for table in tables:
            targets = table_shards(weights[table.full_name], self.groups)
            sources = self.rows.pop(table.full_name, None)
            if sources is None:
                init_rows(table, targets, self.seed)
            else:
                redistribute(sources, targets, self.device)


@without_guards
def detach_rows(tables: list[Table], rank: int) -> dict[str, list[TableShard]]:
    """Move the unsharded tables to meta; return where rows are: rank 0's win, as under DDP, and
    others free theirs."""
    rows = {}
    for table in tables:
        weight = table.parameter
        if not weight.is_meta:
            num_rows, columns = weight.shape
            source = weight.detach() if rank == 0 else None
            rows[table.full_name] = [TableShard(0, 0, 0, num_rows, columns, source)]
    for table in tables:
        if table.full_name not in rows:
            continue
        free_weights(table.module)
        if table.plain is not None:
            # Moving has made a new parameter, which the user's embedding shows from now on.
            table.plain.weight = table.parameter
    return rows


def _shards_by_table(
    sharded: ShardedModule, tables: list[Table], shards: list[LocalShard], device: torch.device
) -> dict[str, list[LocalShard]]:
    """Return this rank's shards of each table of a collection, by full name; `shards` are those in
    kernels."""
    shards_by_table: dict[str, list[LocalShard]] = {table.full_name: [] for table in tables}
    full_names = {table.name: table.full_name for table in tables}
    for shard in shards:
        shards_by_table[full_names[shard.table]].append(shard)
    for table in tables:
        local = shards_by_table[table.full_name]
        weight = sharded.get_parameter(table.local_key)
        # data_parallel: torchrec's DDP averages the gradient of this very parameter
        if not local and weight.numel():
            weight = make_freezable(weight)
            local.append(LocalShard(table.name, weight, sparse=False, replicated=True))
        # optimizers ask for columns; draws of other types or devices take other random numbers
        elif not local:
            empty = table.parameter.new_empty(0, table.config.embedding_dim, device=device)
            local.append(LocalShard(table.name, nn.Parameter(empty)))
        for shard in local:
            shard.weight.requires_grad_(table.parameter.requires_grad)
    return shards_by_table


def _set_offsets(local: list[LocalShard], shards: list[TableShard]) -> None:
    """Set the offsets of this rank's shards of a table; `shards` are those of all ranks."""
    # FBGEMM's weights have no offsets. They share memory with torchrec's local shards, and so have
    # their addresses.
    shard_at = {s.tensor.data_ptr(): s for s in shards if s.tensor is not None and s.tensor.numel()}
    for shard in local:
        if shard.weight.numel():
            place = shard_at[shard.weight.data_ptr()]
            shard.row = place.row
            shard.column = place.column


def _guard(
    result: ShardedTables, table: Table, shards: list[TableShard], is_gathered: bool
) -> None:
    """Guard this rank's shards of a table against being read as the full table; `shards` are those
    of all ranks."""
    local = result.shards[table.full_name]
    # Every rank has all rows: what user code reads is right.
    if local[0].replicated:
        return
    shape = table.config.num_embeddings, table.config.embedding_dim
    rectangles: list[list[Any]] = [[] for _ in range(result.groups.num_ranks)]
    for shard in sorted(shards, key=attrgetter("rectangle")):
        if shard.num_rows:
            rectangles[shard.rank].append(shard.rectangle)
    guarded = GuardedTable(
        name=table.full_name,
        shape=shape,
        weights=[shard.weight for shard in local],
        # Of the shards of all ranks, so that all allow or refuse the same operations.
        has_single_shards=max(Counter(shard.rank for shard in shards).values()) == 1,
        state=result.state,
        rectangles=rectangles,
        gathering=Gathering(shape, rectangles, result.state) if is_gathered else None,
        score=score,
    )
    guard(guarded, [(shard.row, shard.column) for shard in local])


def _proxy(result: ShardedTables, path: str) -> ShardedProxy:
    sharded = result.sharded[path]
    weights = {}
    for table in result.tables_of(path):
        local = [shard.weight for shard in result.shards[table.full_name]]
        weights[table.original_key] = ProxyWeight(table.full_name, table.local_key, local)
    return make_proxy(
        result.originals[path], path, sharded, weights, partial(_load, sharded, result.groups)
    )


@torch.no_grad()
@rewriting()
def _load(sharded: ShardedModule, groups: ShardingGroups, name: str, value: Any) -> str:
    """Load a table from a full tensor, one in a file, or one sharded alike; return what is wrong,
    or ""."""
    target = sharded.state_dict()[name]
    if tuple(value.size()) != tuple(target.size()):
        return (
            f"the table is {tuple(target.size())}, but there is {tuple(value.size())} to load into "
            "it."
        )
    shards = table_shards(target, groups)
    if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
        copy_from_full(shards, value)
        return ""
    if not isinstance(value, ShardedTensor):
        try:
            value.read_into(chunks_of(shards))
        except ValueError as error:
            return f"{error}; load a checkpoint of trainer.save_checkpoint."
        return ""
    saved = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    for shard in shards:
        if shard.tensor is None:
            continue
        source = saved.get((shard.row, shard.column))
        if source is None or source.shape != shard.tensor.shape:
            return (
                "the table was sharded differently when it was saved; load a checkpoint of "
                "trainer.save_checkpoint."
            )
        shard.tensor.copy_(source)
    return ""


class ReplicatedTable(TableBatchedEmbeddingSlice):
    """A slice that can be frozen and unfrozen: without a gradient, optimizers leave it alone."""

    learns = True

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the table learns now."""
        return self.learns

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.learns = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> "ReplicatedTable":
        """Freeze or unfreeze the table."""
        self.learns = bool(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The averaged gradient; None while the table is frozen."""
        gradient: Any = TableBatchedEmbeddingSlice.grad
        return gradient.fget(self) if self.learns else None  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        TableBatchedEmbeddingSlice.grad.fset(self, value)  # type: ignore[attr-defined]


# else one such table makes optimizers launch kernels for each parameter alone
use_foreach_for(ReplicatedTable)


def make_freezable(weight: TableBatchedEmbeddingSlice) -> TableBatchedEmbeddingSlice:
    """Turn torchrec's own parameter into one that can be frozen."""
    # By its class, since it must stay the same object: torchrec's DDP and optimizer hold references
    # to it. The class adds properties only, so that the object's memory layout fits.
    weight.__class__ = ReplicatedTable
    return weight
