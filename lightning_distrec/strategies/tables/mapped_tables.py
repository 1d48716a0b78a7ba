"""Tables that map ids to rows: what the planner may do with them, what resets a row, and what is
refused."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_distrec._compat.torchrec_modules import fill_weight
from lightning_distrec.errors import ConfigError, PlanError, ShardingError
from lightning_distrec.optimizers.param_groups import initial_state
from lightning_distrec.optimizers.translation import TableUpdate
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.mapped_ids import MappedIds, RowReset
from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import Policy, RowsOfIds, dynamic_spec
from lightning_distrec.sharding.meta_weight import carry_record
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import MAPS_IDS, Table
from lightning_distrec.sharding.weights.shard_access import without_guards


def with_dynamic_ids(table: Table, options: TableOptions) -> Table:
    """Return the table, with a mapping where its options say so; its module gets as many rows as
    they say.

    Raises ConfigError: the table maps ids already, or has an id that is no row.
    """
    if options.ids is None:
        return table
    if table.mapping is not None:
        raise ConfigError(
            f"table '{table.full_name}': ids='dynamic', but its module maps ids itself. Leave ids "
            "out."
        )
    if isinstance(table.plain, nn.Embedding) and table.plain.padding_idx is not None:
        raise ConfigError(
            f"table '{table.full_name}': ids='dynamic', but padding_idx={table.plain.padding_idx} "
            "is the number of a row of zeros, and no id has a fixed row. Leave padding_idx out, "
            "and mask the looked up rows."
        )
    policies: dict[str, Policy] = {"never": "none", "lru": "lru", "lfu": "lfu"}
    rows = options.rows or table.config.num_embeddings
    policy = policies[options.evict or "lru"]
    spec = dynamic_spec(rows, options.buckets, policy, options.min_sights or 1)
    if spec.num_rows != table.config.num_embeddings:
        _resize(table, spec.num_rows)
    return replace(table, mapping=spec)


def refuse_shared_features(tables: list[Table]) -> None:
    """Raise ConfigError: a feature is looked up in a table that maps ids, and in one whose ids are
    numbers of rows."""
    kinds: dict[tuple[str, str], Table] = {}
    for table in tables:
        for feature in table.config.feature_names:
            other = kinds.setdefault((table.collection, feature), table)
            if (other.mapping is None) != (table.mapping is None):
                raise ConfigError(
                    f"feature '{feature}' is looked up in tables '{other.full_name}' and "
                    f"'{table.full_name}', of which one has ids='dynamic'. Set it for both, or "
                    "give one of them a feature of its own."
                )


@without_guards
def _resize(table: Table, rows: int) -> None:
    """Give an unsharded table this number of rows. They repeat its own, which keeps the user's
    init."""
    old_weight = table.parameter
    repeated = torch.arange(rows, device=old_weight.device) % len(old_weight)
    weight = (
        old_weight.detach()[repeated]
        if not old_weight.is_meta
        else old_weight.new_empty(rows, old_weight.shape[1])
    )
    fill_weight(table.module, table.local_key, weight, old_weight.requires_grad)
    carry_record(old_weight, table.parameter)
    # torchrec's sharder reads the number of rows from the config, checkpoints and reprs from the
    # module.
    embedding: Any = table.module.get_submodule(table.local_key.removesuffix(".weight"))
    embedding.num_embeddings = rows
    table.config.num_embeddings = rows
    if table.plain is not None:
        table.plain.weight = table.parameter
        table.plain.num_embeddings = rows


def with_mapping(table: Table, options: TableOptions, layout: NodeLayout) -> TableOptions:
    """Return what the planner may do with a table, where it maps ids: rows are where the ids'
    buckets are.

    Raises PlanError: the user's options, the table's rows or the number of ranks do not allow it.
    """
    if table.mapping is None:
        return options
    subject = f"table '{table.full_name}' maps ids to rows"
    if "row_wise" not in (options.sharding_types or ["row_wise"]):
        raise PlanError(
            f"{subject}: sharding_types={options.sharding_types}: it can only be row_wise. Allow "
            "that."
        )
    if "fused" not in (options.compute_kernels or ["fused"]):
        raise PlanError(
            f"{subject}: compute_kernels={options.compute_kernels}: it needs fused. Allow that."
        )
    if options.gathered_weight:
        raise PlanError(
            f"{subject}: gathered_weight=True: the rows of its weight have no fixed ids. Leave it "
            "out."
        )
    if layout.num_replicas > 1:
        raise PlanError(
            f"{subject}: each of the sharding_groups would map ids by itself. Leave "
            "sharding_groups out."
        )
    reason = table.mapping.buckets_obstacle(layout.num_ranks)
    if reason:
        raise PlanError(f"{subject}: {reason}.")
    return replace(options, sharding_types=["row_wise"], compute_kernels=["fused"])


def refuse_unsharded_mappings(
    module: nn.Module, left_alone: Mapping[str, str], num_ranks: int
) -> None:
    """Raise ShardingError: ranks would map the same ids to different rows of tables whose gradients
    are averaged."""
    for path, reason in left_alone.items():
        if num_ranks > 1 and isinstance(module.get_submodule(path), MAPS_IDS):
            raise ShardingError(
                f"'{path}' cannot be sharded: {reason}. Unsharded, each of {num_ranks} ranks would "
                "map ids to rows of its own. Use one rank, or a module that "
                "docs/how_to/dynamic_ids.md lists."
            )


def mapped_ids(
    shards: ShardedTables, path: str, updates: Mapping[str, TableUpdate]
) -> MappedIds | None:
    """Return what maps the ids of the collection at `path`; None where ids are numbers of rows."""
    tables = shards.tables_of(path)
    mappings = {}
    resets = {}
    for table in tables:
        mapping = shards.mappings.get(table.full_name)
        if mapping is not None:
            mappings[table.name] = mapping
            shard = shards.shards[table.full_name][0]
            states = partial(_states, shards, shard, updates[table.full_name])
            resets[table.name] = RowReset(shard, mapping.initial_rows, states)
    if not mappings:
        return None
    proxy = shards.proxies[path]
    num_rows = {table.name: table.config.num_embeddings for table in tables}
    full_names = {table.name: table.full_name for table in tables}

    def learns(name: str) -> bool:
        return proxy.training and shards.learns(full_names[name])

    return MappedIds(
        shards.sharded[path], mappings, num_rows, resets, learns, is_sequence=not tables[0].pooled
    )


class NotedIds:
    """The ids that MCHManagedCollisionModules have noted since they last gave rows: each rank saves
    its own."""

    def __init__(self, mappings: Mapping[str, RowsOfIds]) -> None:
        self._mappings = {
            name: mapping for name, mapping in mappings.items() if isinstance(mapping, MchMapping)
        }

    def __bool__(self) -> bool:
        """Whether there are such modules."""
        return bool(self._mappings)

    def state(self) -> dict[str, Any]:
        """Return this rank's, by table."""
        return {name: mapping.noted() for name, mapping in self._mappings.items()}

    def restore(
        self, local_state: Mapping[str, Any] | None, first_state: Mapping[str, Any] | None
    ) -> None:
        """Continue with them. local_state: None with another number of ranks, whose buckets were
        others."""
        lost = []
        for name, mapping in self._mappings.items():
            if local_state is not None and name in local_state:
                mapping.note(local_state[name])
            elif first_state is None or first_state.get(name, {}).get("lookups", True):
                lost.append(name)
        if lost:
            rank_zero_warn(
                f"table '{lost[0]}' ({len(lost)} in all): the ids that MCHManagedCollisionModule "
                "has noted since it last gave rows cannot be restored from this checkpoint. If it "
                "was saved in the middle of an eviction_interval, some ids get rows later than in "
                "a run that never stopped. Resume with as many ranks as have saved it, or save "
                "after a multiple of eviction_interval steps."
            )


def mapping_counts(mappings: Mapping[str, RowsOfIds], ranks: Ranks) -> dict[str, tuple[int, ...]]:
    """Collective. Return, for each table, by full name, over all ranks: rows, rows that an id has;
    and since the start distinct ids that were looked up, those of them that shared a row, rows that
    were taken from an id.
    """
    local_counts = {
        name: (m.num_rows, m.num_taken, m.counts.looked_up, m.counts.shared, m.counts.evicted)
        for name, m in mappings.items()
    }
    gathered = ranks.all_gather(local_counts) if local_counts else [local_counts]
    totals = {}
    for name in local_counts:
        counts = [rank_counts[name] for rank_counts in gathered]
        totals[name] = tuple(map(sum, zip(*counts, strict=True)))
    return totals


@without_guards
def _states(
    shards: ShardedTables, shard: LocalShard, update: TableUpdate
) -> list[tuple[Tensor, float]]:
    """Return what optimizers keep for each row of a shard, with the value that it starts from."""
    if update.in_backward:
        return [(state, update.initial_state) for state in shards.fused_state().get(id(shard), [])]
    if update.param_group is None:
        return []
    state: dict[str, Any] = update.param_group.optimizer.state.get(shard.weight, {})
    rows = len(shard.values)
    states = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == rows:
            states.append((value.detach(), initial_state(update.param_group.group, key)))
    return states
