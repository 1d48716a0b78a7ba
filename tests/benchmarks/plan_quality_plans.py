"""The timed plans: those of the planners, one per sharding type, those one table away from ours,
and a sample."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from lightning_distrec._compat.torchrec_modules import silence_torchrec
from lightning_distrec.sharding.planning.bandwidths import AssumedBandwidths, bandwidth_request
from lightning_distrec.sharding.planning.constraints import (
    TableConstraints,
    allowed_types,
    torchrec_constraint,
)
from lightning_distrec.sharding.planning.planned_table import PlannedShard, PlannedTable, in_order
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.sharding_options import (
    EstimatedOption,
    without_duplicates,
)
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.topology import RankMemory, make_topology
from lightning_distrec.sharding.sharders import EVERY_RANK_TYPES, sharders
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import find_tables
from tests.benchmarks.plan_quality_model import BATCH_SIZE, make_tables, options

MEMORY_BYTES = 4 * 2**30
"""Of each rank: more than enough, so that time alone tells plans apart."""

Key = tuple[tuple[str, tuple[int, ...]], ...]
"""What tells plans apart: of each table its sharding type, and the ranks of its shards, sorted."""


class Space:
    """All plans of the model's tables on some ranks."""

    def __init__(self, layout: NodeLayout) -> None:
        self.layout = layout
        tree = nn.Module()
        tree.ebc = make_tables(torch.device("meta"))
        self.tree, self.tables = tree, find_tables(tree).tables
        table_values = options()
        self.constraints: Mapping[str, TableConstraints] = {
            table.full_name: TableConstraints(
                allowed_types(table, table_values[table.name], layout, ""),
                False,
                table_values[table.name],
            )
            for table in self.tables
        }
        topology = self.topology(default_bandwidths())
        self.options: list[list[EstimatedOption]] = [
            without_duplicates(entry)
            for entry in Planner(
                self.tables, self.constraints, topology, BATCH_SIZE
            ).estimated_options()
        ]

    def topology(self, bandwidths: AssumedBandwidths) -> Topology:
        """Return torchrec's description of the ranks."""
        ranks = self.layout.num_ranks
        memory = RankMemory(device_bytes=(MEMORY_BYTES,) * ranks, host_bytes=(0,) * ranks)
        return make_topology(torch.device("cpu"), self.layout, memory, bandwidths)

    @property
    def size(self) -> int:
        """How many plans there are; those that differ by the ranks' numbers only count as many."""
        ways = [
            sum(len(list(self._ranks_of(option))) for option in table_values)
            for table_values in self.options
        ]
        return int(np.prod(ways, dtype=object))

    def drawn(self, draw: np.random.Generator) -> ShardingPlan:
        """Return a plan in which each table's sharding type is as likely as any, and then each
        place."""
        tables = {}
        for number, table in enumerate(self.tables):
            tables[table.full_name] = self._drawn_table(number, draw)
        return self._plan(tables)

    def one_changed(self, plan: ShardingPlan, draw: np.random.Generator) -> ShardingPlan:
        """Return a plan with one table of `plan` sharded in another way, drawn in the same way."""
        number = int(draw.integers(len(self.tables)))
        return self._plan(
            dict(plan.tables) | {self.tables[number].full_name: self._drawn_table(number, draw)}
        )

    def of_one_type(self, bandwidths: AssumedBandwidths) -> dict[str, ShardingPlan]:
        """Return the best plan, as estimated, of each sharding type that all tables can have."""
        actual = {}
        for kind in sorted({
            option.sharding_type for table_values in self.options for option in table_values
        }):
            constraints = {
                name: replace(item, sharding_types=(kind,))
                for name, item in self.constraints.items()
            }
            actual[f"all {kind}"] = Planner(
                self.tables, constraints, self.topology(bandwidths), BATCH_SIZE
            ).make_plan()
        return actual

    def torchrecs(self, bandwidths: AssumedBandwidths) -> ShardingPlan:
        """Return what torchrec's EmbeddingShardingPlanner picks, told of the tables what ours is
        told."""
        planner = EmbeddingShardingPlanner(
            topology=self.topology(bandwidths),
            batch_size=BATCH_SIZE,
            constraints={
                t.name: torchrec_constraint(t, self.constraints[t.full_name]) for t in self.tables
            },
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=NoopEmbeddingStats(),
            debug=False,
        )
        with silence_torchrec():
            actual = planner.plan(self.tree, sharders()).plan["ebc"]
        shardings = {table.full_name: actual[table.name] for table in self.tables}
        return ShardingPlan.from_torchrec(self.tables, shardings, self.layout, "cpu")

    def estimate(self, plan: ShardingPlan, bandwidths: AssumedBandwidths) -> float:
        """Return the milliseconds of a plan's critical path."""
        estimated = Planner(
            self.tables, self.constraints, self.topology(bandwidths), BATCH_SIZE
        ).estimate(plan)
        return estimated.cost.critical_path

    def key(self, plan: ShardingPlan) -> Key:
        """Return what is equal for plans that differ by the numbers of alike ranks and nodes
        only."""
        return min(self._key(plan, names) for names in renamed_ranks(self.layout))

    def _key(self, plan: ShardingPlan, names: tuple[int, ...]) -> Key:
        return tuple(
            (table.sharding_type, tuple(sorted(names[shard.rank] for shard in table.shards)))
            for table in plan.tables.values()
        )

    def _plan(self, tables: dict[str, PlannedTable]) -> ShardingPlan:
        return ShardingPlan(layout=self.layout, device="cpu", tables=tables)

    def _drawn_table(self, number: int, draw: np.random.Generator) -> PlannedTable:
        option = self.options[number][int(draw.integers(len(self.options[number])))]
        ways = list(self._ranks_of(option))
        ranks = ways[int(draw.integers(len(ways)))]
        shards = in_order(
            PlannedShard(rank, offset, size)
            for rank, offset, size in zip(ranks, option.offsets, option.sizes, strict=True)
        )
        config = self.tables[number].config
        return PlannedTable(
            name=self.tables[number].full_name,
            num_rows=config.num_embeddings,
            dim=config.embedding_dim,
            sharding_type=option.sharding_type,
            compute_kernel=option.kernel,
            shards=shards,
        )

    def _ranks_of(self, option: EstimatedOption) -> Iterator[tuple[int, ...]]:
        """Yield the ranks on which a option's shards can be; of like shards' places, each one
        once."""
        ranks, on_node = range(self.layout.num_ranks), self.layout.ranks_on_node
        nodes = [tuple(ranks[start : start + on_node]) for start in range(0, len(ranks), on_node)]
        if option.sharding_type in EVERY_RANK_TYPES:
            yield tuple(ranks)
        elif option.sharding_type == "table_row_wise":
            yield from nodes
        elif option.sharding_type == "table_column_wise":
            for node in nodes:
                yield from itertools.combinations_with_replacement(node, len(option.size_numbers))
        else:
            yield from itertools.combinations_with_replacement(ranks, len(option.size_numbers))


def renamed_ranks(layout: NodeLayout) -> Iterator[tuple[int, ...]]:
    """Yield rank -> rank for each way to number nodes, and the ranks of a node, anew."""
    on_node = layout.ranks_on_node
    nodes = [range(start, start + on_node) for start in range(0, layout.num_ranks, on_node)]
    for order in itertools.permutations(nodes):
        for within in itertools.product(*(itertools.permutations(node) for node in order)):
            yield tuple(itertools.chain.from_iterable(within))


def default_bandwidths() -> AssumedBandwidths:
    """Return torchrec's."""
    return bandwidth_request(None, {}).with_measured({})


def sampled(
    space: Space, named: Mapping[str, ShardingPlan], near: str, number: int, seed: int
) -> dict[str, ShardingPlan]:
    """Return name -> plan: `named`, and others up to `number` in all, half of them drawn, half one
    table from `near`.

    A plan that is another by other numbers of its ranks is left out, but for those of `named`.
    """
    draw = np.random.default_rng(seed)
    plans = dict(named)
    keys = {space.key(plan) for plan in plans.values()}
    for tried in range(100 * number):
        if len(plans) >= number:
            break
        close = bool(tried % 2)
        plan = space.one_changed(named[near], draw) if close else space.drawn(draw)
        if (key := space.key(plan)) not in keys:
            keys.add(key)
            plans[f"{'near' if close else 'drawn'} {len(plans)}"] = plan
    return plans
