"""The mappings of ids that tables have on this rank while they are sharded, and afterwards."""

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distrec._compat.torchrec_modules import (
    COLLISIONS,
    EMBEDDINGS,
    IDENTITIES,
    MCH_IDS,
    METADATA,
    MODULES,
    hash_zch_state,
    set_hash_zch_state,
)
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.mapping.id_mapping import IdMapping
from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import MchSpec
from lightning_distrec.sharding.mapping.state import (
    AnyMapping,
    ShardedCollisions,
    attach_mapping,
    lookups_with_mappings,
    restore_mch,
)
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.tables import Table, managed_module

# Few, since every rank has all of them; an id chooses one by its remainder (RowReset).
NUM_INITIAL_ROWS = 1024


def hold_mappings(result: ShardedTables, earlier: ShardedTables | None) -> None:
    """Collective. Give every table with a mapping this rank's part of it, and rows for ids that get
    another's.

    earlier: the sharding whose mappings go on; other tables begin with those of their unsharded
    modules.
    """
    num_ranks = dist.get_world_size()
    rank = dist.get_rank()
    for table in result.tables:
        name = table.full_name
        spec = table.mapping
        if spec is None:
            continue
        mapping_before = None if earlier is None else earlier.mappings.get(name)
        if mapping_before is not None and mapping_before.spec == spec:
            result.mappings[name] = mapping_before
        else:
            per_rank = spec.num_buckets // num_ranks
            shard = result.shards[name][0]
            buckets = rank * per_rank, per_rank, shard.weight.device
            mapping: AnyMapping
            if isinstance(spec, MchSpec):
                mapping = MchMapping(spec, *buckets, managed_module(table))
            else:
                mapping = IdMapping(spec, *buckets)
            # Ranks share buckets evenly (buckets_obstacle): torchrec's block of rows is that of the
            # buckets.
            assert shard.row == mapping.first_row
            _begin(mapping, table)
            result.mappings[name] = mapping
            mapping.initial_rows = _initial_rows(result, table).to(shard.weight.device)
    for path, proxy in result.proxies.items():
        tables = [table for table in result.tables_of(path) if table.mapping is not None]
        unmanaged: dict[str, AnyMapping] = {}
        managed: dict[str, AnyMapping] = {}
        for table in tables:
            mapping = result.mappings[table.full_name]
            if table.collisions is None:
                unmanaged[table.original_key.removesuffix("weight")] = mapping
            else:
                managed[f"{MODULES}.{table.name}."] = mapping
                result.collisions[table.collisions] = ShardedCollisions(managed)
        proxy.mappings = unmanaged


def unshard_mappings(tables: ShardedTables, full: Mapping[str, Tensor]) -> None:
    """Give the unsharded modules the mappings; full: state by key in the module's state_dict, none
    where it is dropped.

    The modules find the rows of ids then; torchrec's own give new ids rows in training too, where
    they can.
    """
    for table in (table for table in tables.tables if table.mapping is not None):
        module = managed_module(table)
        if module is not None:
            prefix = (
                f"{table.collection.removesuffix(EMBEDDINGS)}{COLLISIONS}.{MODULES}.{table.name}."
            )
            if prefix + MCH_IDS in full:
                restore_mch(
                    module, {name.removeprefix(prefix): value for name, value in full.items()}
                )
            if prefix + IDENTITIES in full:
                set_hash_zch_state(module, full[prefix + IDENTITIES], full.get(prefix + METADATA))
    root = nn.Module()
    for path, original in {table.collection: table.original for table in tables.tables}.items():
        state = {
            f"m.{key.removeprefix(path)[1:]}": value
            for key, value in full.items()
            if key.startswith(f"{path}.")
        }
        root.m = original
        for lookup, lookup_state in lookups_with_mappings(root, state):
            attach_mapping(lookup, lookup_state)


def _begin(mapping: AnyMapping, table: Table) -> None:
    """Take this rank's part of torchrec's mapping. Raises ShardingError: buckets would not give
    what it learned."""
    module = managed_module(table)
    if module is None:
        return
    if isinstance(mapping, MchMapping):
        problem = mapping.begin()
        if problem:
            raise ShardingError(f"table '{table.full_name}': {problem}")
        return
    identities, used = hash_zch_state(module)
    rows = slice(mapping.first_row, mapping.first_row + mapping.num_rows)
    if len(identities):
        mapping.ids.copy_(identities[rows])
        if used is not None:
            mapping.used.copy_(used[rows])
        mapping.rows_were_set()
        # Else every rank would hold the mapping of all rows, beside its own part.
        set_hash_zch_state(
            module, identities.new_empty(0, 1), None if used is None else used.new_empty(0, 1)
        )


def _initial_rows(result: ShardedTables, table: Table) -> Tensor:
    """Collective for plain embeddings, of which the rows with which the run starts are taken."""
    num_rows = min(NUM_INITIAL_ROWS, table.config.num_embeddings)
    if table.plain is not None:
        return result.full_weight(table.full_name, 0, num_rows)
    # As torchrec does, by the table's init function; with a seed of the table's own, alike on all
    # ranks and restarts.
    rows = torch.empty(num_rows, table.config.embedding_dim)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(table.full_name.encode()))
        assert table.config.init_fn is not None
        table.config.init_fn(rows)
    return rows
