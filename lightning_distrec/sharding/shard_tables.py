"""Shards tables: makes torchrec's sharded modules, brings the rows to the shards, and puts proxies into the module."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.types import ShardedModule, ShardedTensor

from lightning_distrec._compat.fbgemm import fbgemm_kernels
from lightning_distrec._compat.torch import use_foreach_for
from lightning_distrec._compat.torchrec import (
    attach_fused_optimizer,
    detach_fused_optimizer,
    free_unsharded_tables,
    free_weights,
    silence_torchrec,
)
from lightning_distrec.sharding.collective_reads import Gathering
from lightning_distrec.sharding.initial_weights import (
    TableShard,
    chunks_of,
    copy_from_full,
    init_rows,
    redistribute,
    table_shards,
)
from lightning_distrec.sharding.mapped_tables import hold_mappings
from lightning_distrec.sharding.proxies import ProxyWeight, ShardedProxy, make_proxy
from lightning_distrec.sharding.row_gradients import LocalShard, local_shards_of
from lightning_distrec.sharding.shard_access import GuardedTable, rewriting, watch_caches
from lightning_distrec.sharding.shard_weight import guard
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.sharders import QuantizedComms, ShardingByTable, sharder_of
from lightning_distrec.sharding.sharding_groups import ShardingGroups
from lightning_distrec.sharding.tables import Table
from lightning_distrec.unpicklable import refuse_pickling

FusedArguments = Mapping[str, tuple[dict[str, Any], str]]
"""Full name of a table -> FBGEMM's arguments for its in-backward optimizer, and the label of its param group; tables
of one label share a kernel."""


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """How the tables of a module are to be sharded."""

    root: nn.Module
    """The module, which is sharded in place."""
    tables: list[Table]
    plan: ShardingByTable
    """Counts ranks within a group."""
    fused: FusedArguments
    """For every table that is not data_parallel."""
    device: torch.device
    rows: Mapping[str, list[TableShard]]
    """Rows of an earlier sharding by full name. Other tables keep the rows of rank 0's unsharded weight, as DDP would,
    or get new ones by `seed` where they were built on meta."""
    seed: int
    comms: QuantizedComms
    """The types in which rows and gradients are sent."""
    gathered: Set[str]
    """Tables whose full weight user code may read."""
    groups: ShardingGroups
    """The ranks among which tables are sharded."""
    earlier: ShardedTables | None = None
    """The sharding whose mappings of ids go on."""


def shard_tables(sharding: TableSharding) -> ShardedTables:
    """Collective. Shard the tables by the plan, and bring their rows to the shards."""
    tables, device = sharding.tables, sharding.device
    # torchrec initialises shards, a different number of draws on each rank; the user's generators must stay alike.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        sharded = _sharded_modules(sharding)
        result = ShardedTables(sharding.root, tables, sharding.plan, sharded, sharding.groups)
        _bring_rows(result, sharding)
    for path, module in sharded.items():
        kernels = [(kernel, local_shards_of(kernel)) for kernel in fbgemm_kernels(module)]
        result.kernels += kernels
        watch_caches(kernel for kernel, _ in kernels)
        shards = [shard for _, kernel_shards in kernels for shard in kernel_shards]
        result.shards |= _shards_by_table(module, result.tables_of(path), shards)
        result.proxies[path] = _proxy(result, path)
    tables_by_name = {table.full_name: table for table in tables}
    for name, all_shards in result.table_shards().items():
        _set_offsets(result.shards[name], all_shards)
        _guard(result, tables_by_name[name], all_shards, name in sharding.gathered)
        for shard in result.shards[name]:
            if not shard.replicated:
                refuse_pickling(shard.weight, name)
    hold_mappings(result, sharding.earlier)
    for module in sharded.values():
        free_unsharded_tables(module)
    for table in tables:
        free_weights(table.module)
        if table.plain is not None:
            table.plain.weight = table.parameter
    result.put_proxies_back()
    return result


def _sharded_modules(sharding: TableSharding) -> dict[str, ShardedModule]:
    environment = sharding.groups.environment()
    sharded: dict[str, ShardedModule] = {}
    for path in dict.fromkeys(table.collection for table in sharding.tables):
        tables = [table for table in sharding.tables if table.collection == path]
        for table in tables:
            if table.full_name in sharding.fused:
                attach_fused_optimizer(table.parameter, *sharding.fused[table.full_name])
        parameter_sharding = {table.name: sharding.plan[table.full_name] for table in tables}
        sharder = sharder_of(tables[0], sharding.comms)
        with silence_torchrec():
            sharded[path] = sharder.shard(tables[0].module, parameter_sharding, environment, sharding.device, path)
        for table in tables:
            detach_fused_optimizer(table.parameter)
    return sharded


def _bring_rows(result: ShardedTables, sharding: TableSharding) -> None:
    shards = result.table_shards()
    for table in result.tables:
        targets = shards[table.full_name]
        if table.full_name in sharding.rows:
            redistribute(sharding.rows[table.full_name], targets, sharding.device)
        elif table.parameter.is_meta:
            init_rows(table, targets, sharding.seed)
        else:
            rows, columns = table.parameter.shape
            unsharded = TableShard(0, 0, 0, rows, columns, table.parameter if result.groups.rank == 0 else None)
            redistribute([unsharded], targets, sharding.device)


def _shards_by_table(
    sharded: ShardedModule, tables: list[Table], shards: list[LocalShard]
) -> dict[str, list[LocalShard]]:
    """Return this rank's shards of each table of a collection, by full name; `shards` are those in kernels."""
    shards_by_table: dict[str, list[LocalShard]] = {table.full_name: [] for table in tables}
    full_names = {table.name: table.full_name for table in tables}
    for shard in shards:
        shards_by_table[full_names[shard.table]].append(shard)
    for table in tables:
        local = shards_by_table[table.full_name]
        weight = sharded.get_parameter(table.local_key)
        if not local and weight.numel():  # data_parallel: torchrec's DDP averages the gradient of this very parameter
            local.append(LocalShard(table.name, make_freezable(weight), sparse=False, replicated=True))
        elif not local:
            empty = torch.empty(0, table.config.embedding_dim, device=weight.device)  # optimizers ask for columns
            local.append(LocalShard(table.name, nn.Parameter(empty)))
        for shard in local:
            shard.weight.requires_grad_(table.parameter.requires_grad)
    return shards_by_table


def _set_offsets(local: list[LocalShard], shards: list[TableShard]) -> None:
    """Set the offsets of this rank's shards of a table; `shards` are those of all ranks."""
    shard_at = {s.tensor.data_ptr(): s for s in shards if s.tensor is not None and s.tensor.numel()}
    for shard in local:
        if shard.weight.numel():
            place = shard_at[shard.weight.data_ptr()]
            shard.row, shard.column = place.row, place.column


def _guard(result: ShardedTables, table: Table, shards: list[TableShard], is_gathered: bool) -> None:
    """Guard this rank's shards of a table against being read as the full table; `shards` are those of all ranks."""
    local = result.shards[table.full_name]
    if local[0].replicated:
        return
    shape = table.config.num_embeddings, table.config.embedding_dim
    rectangles: list[list[Any]] = [[] for _ in range(result.groups.num_ranks)]
    for shard in shards:
        if shard.num_rows:
            rectangles[shard.rank].append(shard.rectangle)
    guarded = GuardedTable(
        name=table.full_name,
        shape=shape,
        weights=[shard.weight for shard in local],
        has_single_shards=max(Counter(shard.rank for shard in shards).values()) == 1,
        state=result.state,
        gathering=Gathering(shape, list(map(sorted, rectangles)), result.state) if is_gathered else None,
    )
    guard(guarded, [(shard.row, shard.column) for shard in local])


def _proxy(result: ShardedTables, path: str) -> ShardedProxy:
    sharded, weights = result.sharded[path], {}
    for table in result.tables_of(path):
        local = [shard.weight for shard in result.shards[table.full_name]]
        weights[table.original_key] = ProxyWeight(table.full_name, table.local_key, local)
    return make_proxy(result.originals[path], path, sharded, weights, partial(_load, sharded, result.groups))


@torch.no_grad()
def _load(sharded: ShardedModule, groups: ShardingGroups, name: str, value: Any) -> str:
    """Load a table of `sharded`, by its name in the state_dict, and return what is wrong, or "".

    value: an unsharded tensor, one in a file, or a ShardedTensor that is sharded in the same way.
    """
    with rewriting():
        return _load_rows(sharded.state_dict()[name], value, groups)


def _load_rows(target: Tensor, value: Any, groups: ShardingGroups) -> str:
    if tuple(value.size()) != tuple(target.size()):
        return f"the table is {tuple(target.size())}, but there is {tuple(value.size())} to load into it."
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
            return "the table was sharded differently when it was saved; load a checkpoint of trainer.save_checkpoint."
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
        return TableBatchedEmbeddingSlice.grad.fget(self) if self.learns else None  # type: ignore[attr-defined, no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        TableBatchedEmbeddingSlice.grad.fset(self, value)  # type: ignore[attr-defined]


use_foreach_for(ReplicatedTable)  # else one such table makes optimizers launch kernels for each parameter alone


def make_freezable(weight: TableBatchedEmbeddingSlice) -> TableBatchedEmbeddingSlice:
    """Turn torchrec's own parameter into one that can be frozen."""
    # By its class, since it must stay the same object: torchrec's DDP and optimizer hold references to it. The class
    # adds properties only, so that the object's memory layout fits.
    weight.__class__ = ReplicatedTable
    return weight
