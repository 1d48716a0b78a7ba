"""The plans that are timed: those of the planners, one for each cut, those one table away from ours, and a sample."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from lightning_distrec._compat.torchrec import silence_torchrec
from lightning_distrec.sharding.planning.bandwidths import ChosenBandwidths, asked_bandwidths
from lightning_distrec.sharding.planning.plan import TableConstraints, allowed_types, constraints_of
from lightning_distrec.sharding.planning.planner import cost_of_plan, make_plan
from lightning_distrec.sharding.planning.sharding_options import EstimatedOption, choices_of, unlike
from lightning_distrec.sharding.planning.topology import NodeLayout, RankMemory, make_topology
from lightning_distrec.sharding.planning.written_plan import (
    WrittenPlan,
    WrittenShard,
    WrittenTable,
    in_order,
    ranks_per_node,
    size_of,
    written_plan,
)
from lightning_distrec.sharding.sharders import sharders
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES
from lightning_distrec.sharding.tables import find_tables
from tests.benchmarks.plan_quality_model import BATCH_SIZE, make_tables, options

MEMORY_BYTES = 4 * 2**30
"""Of each rank: more than enough, so that time alone tells plans apart."""

Key = tuple[tuple[str, tuple[int, ...]], ...]
"""What tells plans apart: of each table its cut, and the ranks of its shards, sorted."""


class Space:
    """All plans of the model's tables on some ranks."""

    def __init__(self, places: NodeLayout) -> None:
        self.places = places
        tree = nn.Module()
        tree.ebc = make_tables(torch.device("meta"))
        self.tree, self.tables = tree, find_tables(tree).tables
        of_table = options()
        self.demands: Mapping[str, TableConstraints] = {
            table.full_name: TableConstraints(
                allowed_types(table, of_table[table.name], places, ""), False, of_table[table.name]
            )
            for table in self.tables
        }
        constraints = constraints_of(self.tables, self.demands)
        topology = self.topology(default_bandwidths())
        self.choices: list[list[EstimatedOption]] = [
            unlike(of) for of in choices_of(self.tables, constraints, topology, BATCH_SIZE, sharders(), {})
        ]

    def topology(self, bandwidths: ChosenBandwidths) -> Topology:
        """Return torchrec's description of the ranks."""
        ranks = self.places.num_ranks
        memory = RankMemory(device_bytes=(MEMORY_BYTES,) * ranks, host_bytes=(0,) * ranks)
        return make_topology(torch.device("cpu"), self.places, memory, bandwidths)

    @property
    def size(self) -> int:
        """How many plans there are; those that differ by the ranks' numbers only count as many."""
        ways = [sum(len(list(self._places_of(choice))) for choice in of_table) for of_table in self.choices]
        return int(np.prod(ways, dtype=object))

    def drawn(self, draw: np.random.Generator) -> WrittenPlan:
        """Return a plan in which each table's cut is as likely as any, and then each place."""
        tables = {}
        for number, table in enumerate(self.tables):
            tables[table.full_name] = self._drawn_table(number, draw)
        return self._plan(tables)

    def one_changed(self, plan: WrittenPlan, draw: np.random.Generator) -> WrittenPlan:
        """Return a plan with one table of `plan` cut or placed in another way, drawn in the same way."""
        number = int(draw.integers(len(self.tables)))
        return self._plan(dict(plan.tables) | {self.tables[number].full_name: self._drawn_table(number, draw)})

    def of_one_cut(self, bandwidths: ChosenBandwidths) -> dict[str, WrittenPlan]:
        """Return the best plan, as estimated, of each cut that all tables can have."""
        found = {}
        for cut in sorted({choice.cut for of_table in self.choices for choice in of_table}):
            demands = {name: replace(demand, sharding_types=(cut,)) for name, demand in self.demands.items()}
            made = make_plan(self.tables, demands, self.topology(bandwidths), BATCH_SIZE)
            found[f"all {cut}"] = written_plan(self.tables, made.plan, self.places, "cpu")
        return found

    def torchrecs(self, bandwidths: ChosenBandwidths) -> WrittenPlan:
        """Return what torchrec's EmbeddingShardingPlanner picks, told of the tables what ours is told."""
        planner = EmbeddingShardingPlanner(
            topology=self.topology(bandwidths),
            batch_size=BATCH_SIZE,
            constraints=constraints_of(self.tables, self.demands),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=NoopEmbeddingStats(),
            debug=False,
        )
        with silence_torchrec():
            found = planner.plan(self.tree, sharders()).plan["ebc"]
        plan = {table.full_name: found[table.name] for table in self.tables}
        return written_plan(self.tables, plan, self.places, "cpu")

    def estimate(self, plan: WrittenPlan, bandwidths: ChosenBandwidths) -> float:
        """Return the milliseconds of a plan's critical path."""
        as_plan = plan.as_plan("cpu", plan.ranks_per_node)
        return cost_of_plan(self.tables, as_plan, self.demands, self.topology(bandwidths), BATCH_SIZE).critical_path

    def key(self, plan: WrittenPlan) -> Key:
        """Return what is equal for plans that differ by the numbers of alike ranks and nodes only."""
        return min(self._key(plan, names) for names in renamed_ranks(self.places))

    def _key(self, plan: WrittenPlan, names: tuple[int, ...]) -> Key:
        return tuple(
            (table.sharding_type, tuple(sorted(names[shard.rank] for shard in table.shards)))
            for table in plan.tables.values()
        )

    def _plan(self, tables: dict[str, WrittenTable]) -> WrittenPlan:
        return WrittenPlan(self.places.num_ranks, ranks_per_node(self.places), "cpu", tables)

    def _drawn_table(self, number: int, draw: np.random.Generator) -> WrittenTable:
        choice = self.choices[number][int(draw.integers(len(self.choices[number])))]
        places = list(self._places_of(choice))
        ranks = places[int(draw.integers(len(places)))]
        shards = in_order(
            WrittenShard(rank, offset, size)
            for rank, offset, size in zip(ranks, choice.offsets, choice.sizes, strict=True)
        )
        return WrittenTable(size_of(self.tables[number]), choice.cut, choice.kernel, shards)

    def _places_of(self, choice: EstimatedOption) -> Iterator[tuple[int, ...]]:
        """Yield the ranks on which a choice's shards can be; of like shards' places, each one once."""
        ranks, on_node = range(self.places.num_ranks), self.places.ranks_on_node
        nodes = [tuple(ranks[start : start + on_node]) for start in range(0, len(ranks), on_node)]
        if choice.cut in EVERY_RANK_TYPES:
            yield tuple(ranks)
        elif choice.cut == "table_row_wise":
            yield from nodes
        elif choice.cut == "table_column_wise":
            for node in nodes:
                yield from itertools.combinations_with_replacement(node, len(choice.which))
        else:
            yield from itertools.combinations_with_replacement(ranks, len(choice.which))


def renamed_ranks(places: NodeLayout) -> Iterator[tuple[int, ...]]:
    """Yield rank -> rank for each way to number nodes, and the ranks of a node, anew."""
    on_node = places.ranks_on_node
    nodes = [range(start, start + on_node) for start in range(0, places.num_ranks, on_node)]
    for order in itertools.permutations(nodes):
        for within in itertools.product(*(itertools.permutations(node) for node in order)):
            yield tuple(itertools.chain.from_iterable(within))


def default_bandwidths() -> ChosenBandwidths:
    """Return torchrec's."""
    return asked_bandwidths(None, {}).with_measured({})


def sampled(
    space: Space, named: Mapping[str, WrittenPlan], near: str, number: int, seed: int
) -> dict[str, WrittenPlan]:
    """Return name -> plan: `named`, and others up to `number` in all, half of them drawn, half one table from `near`.

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
