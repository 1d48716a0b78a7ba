"""Shards tables: makes torchrec's sharded modules, brings the rows to the shards, and puts proxies into the module."""

from collections import Counter
from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule, ShardedTensor, ShardingEnv

from lightning_distrec._compat.fbgemm import fbgemm_kernels
from lightning_distrec._compat.torchrec import (
    attach_fused_optimizer,
    detach_fused_optimizer,
    free_unsharded_tables,
    free_weights,
    silence_torchrec,
)
from lightning_distrec.sharding.data_parallel_tables import make_freezable
from lightning_distrec.sharding.groups.sharding_groups import ShardingGroups
from lightning_distrec.sharding.initial_weights import (
    TableShard,
    chunks_of,
    copy_from_full,
    init_rows,
    redistribute,
    table_shards,
)
from lightning_distrec.sharding.mapped_tables import hold_mappings
from lightning_distrec.sharding.proxies import ShardedProxy, make_proxy
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.row_gradients import LocalShard, local_shards_of
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.sharders import ShardingByTable, sharder_of
from lightning_distrec.sharding.tables import Table
from lightning_distrec.sharding.weights.collective_reads import Gathering
from lightning_distrec.sharding.weights.shard_access import GuardedTable, rewriting, watch_caches
from lightning_distrec.sharding.weights.shard_weight import guard
from lightning_distrec.unpicklable import refuse_pickling

FusedArguments = Mapping[str, tuple[dict[str, Any], str]]
"""Full name of a table -> FBGEMM's arguments for its in-backward optimizer, and the label of its param group; tables
of one label share a kernel."""


def shard_tables(
    root: nn.Module,
    tables: list[Table],
    plan: ShardingByTable,
    fused: FusedArguments,
    device: torch.device,
    held: Mapping[str, list[TableShard]],
    seed: int,
    comms: QuantizedComms,
    gathered: Set[str],
    groups: ShardingGroups,
    earlier: ShardedTables | None = None,
) -> ShardedTables:
    """Collective. Shard the tables by the plan, in place in `root`, and bring their rows to the shards.

    fused: for every table that is not data_parallel.
    held: rows of an earlier sharding by full name; other tables keep the rows of rank 0's unsharded weight, as DDP
    would, or get new ones by `seed` where they were built on meta.
    comms: the types in which rows and gradients are sent. gathered: tables whose full weight user code may read.
    groups: the ranks among which tables are sharded; `plan` counts ranks within a group.
    earlier: the sharding whose mappings of ids go on.
    """
    env = groups.environment()
    # torchrec initialises shards, a different number of draws on each rank; the user's generators must stay alike.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        sharded = _sharded_modules(tables, plan, fused, env, device, comms)
        result = ShardedTables(root, tables, plan, sharded, groups)
        _bring_rows(result, device, held, seed)
    for path, module in sharded.items():
        of_collection = result.tables_of(path)
        kernels = [(kernel, local_shards_of(kernel)) for kernel in fbgemm_kernels(module)]
        result.kernels += kernels
        watch_caches(kernel for kernel, _ in kernels)
        result.shards |= _by_table(module, of_collection, [shard for _, shards in kernels for shard in shards])
        result.proxies[path] = _proxy(module, of_collection, result.shards, groups)
    shapes = {table.full_name: (table.config.num_embeddings, table.config.embedding_dim) for table in tables}
    for name, shards in result.table_shards().items():
        _set_offsets(result.shards[name], shards)
        _guard(result, name, shapes[name], shards, name in gathered)
        for shard in result.shards[name]:
            if not shard.replicated:
                refuse_pickling(shard.weight, name)
    hold_mappings(result, earlier)
    for module in sharded.values():
        free_unsharded_tables(module)
    for table in tables:
        free_weights(table.module)
        if table.plain is not None:
            table.plain.weight = table.parameter
    result.register()
    return result


def _sharded_modules(
    tables: list[Table],
    plan: ShardingByTable,
    fused: FusedArguments,
    env: ShardingEnv,
    device: torch.device,
    comms: QuantizedComms,
) -> dict[str, ShardedModule]:
    sharded: dict[str, ShardedModule] = {}
    for path in dict.fromkeys(table.collection for table in tables):
        of_collection = [table for table in tables if table.collection == path]
        for table in of_collection:
            if table.full_name in fused:
                attach_fused_optimizer(table.parameter, *fused[table.full_name])
        parameter_sharding = {table.name: plan[table.full_name] for table in of_collection}
        sharder = sharder_of(of_collection[0], comms)
        with silence_torchrec():
            sharded[path] = sharder.shard(of_collection[0].module, parameter_sharding, env, device, path)
        for table in of_collection:
            detach_fused_optimizer(table.parameter)
    return sharded


def _bring_rows(result: ShardedTables, device: torch.device, held: Mapping[str, list[TableShard]], seed: int) -> None:
    shards = result.table_shards()
    for table in result.tables:
        targets = shards[table.full_name]
        if table.full_name in held:
            redistribute(held[table.full_name], targets, device)
        elif table.parameter.is_meta:
            init_rows(table, targets, seed)
        else:
            rows, columns = table.parameter.shape
            unsharded = TableShard(0, 0, 0, rows, columns, table.parameter if result.groups.rank == 0 else None)
            redistribute([unsharded], targets, device)


def _by_table(sharded: ShardedModule, tables: list[Table], shards: list[LocalShard]) -> dict[str, list[LocalShard]]:
    """Return this rank's shards of each table of a collection, by full name; `shards` are those in kernels."""
    found: dict[str, list[LocalShard]] = {table.full_name: [] for table in tables}
    full_names = {table.name: table.full_name for table in tables}
    for shard in shards:
        found[full_names[shard.table]].append(shard)
    for table in tables:
        of_table = found[table.full_name]
        weight = sharded.get_parameter(table.local_key)
        if (
            not of_table and weight.numel()
        ):  # data_parallel: torchrec's DDP averages the gradient of this very parameter
            of_table.append(LocalShard(table.name, make_freezable(weight), sparse=False, replicated=True))
        elif not of_table:
            empty = torch.empty(0, table.config.embedding_dim, device=weight.device)  # optimizers ask for columns
            of_table.append(LocalShard(table.name, nn.Parameter(empty)))
        for shard in of_table:
            shard.weight.requires_grad_(table.parameter.requires_grad)
    return found


def _set_offsets(local: list[LocalShard], shards: list[TableShard]) -> None:
    """Set the offsets of this rank's shards of a table; `shards` are those of all ranks."""
    at = {shard.tensor.data_ptr(): shard for shard in shards if shard.tensor is not None and shard.tensor.numel()}
    for shard in local:
        if shard.weight.numel():
            same = at[shard.weight.data_ptr()]
            shard.row, shard.column = same.row, same.column


def _guard(result: ShardedTables, name: str, shape: tuple[int, int], shards: list[TableShard], gathered: bool) -> None:
    """Guard this rank's shards of a table against being read as the full table; `shards` are those of all ranks."""
    local = result.shards[name]
    if local[0].replicated:
        return
    rectangles: list[list[Any]] = [[] for _ in range(result.groups.num_ranks)]
    for shard in shards:
        if shard.num_rows:
            rectangles[shard.rank].append(shard.rectangle)
    table = GuardedTable(
        name=name,
        shape=shape,
        weights=[shard.weight for shard in local],
        has_single_shards=max(Counter(shard.rank for shard in shards).values()) == 1,
        loss_weight=partial(getattr, result, "loss_weight"),
        gathering=Gathering(shape, [sorted(of_rank) for of_rank in rectangles]) if gathered else None,
        group=result.groups.sharding,
    )
    guard(table, [(shard.row, shard.column) for shard in local])


def _proxy(
    sharded: ShardedModule, tables: list[Table], shards: Mapping[str, list[LocalShard]], groups: ShardingGroups
) -> ShardedProxy:
    path = tables[0].collection
    prefix = f"{path}."
    keys = {table.key.removeprefix(prefix): table.local_key for table in tables}
    weights = {t.key.removeprefix(prefix): [shard.weight for shard in shards[t.full_name]] for t in tables}
    names = {t.key.removeprefix(prefix): t.full_name for t in tables}
    return make_proxy(tables[0].original, path, sharded, keys, weights, names, partial(_load, sharded, groups))


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
