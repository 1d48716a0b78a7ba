"""Tables, what each may be, and a topology in; the plan and what it costs out. Runs on one rank, see plan_together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import placement as place_name
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardMetadata

from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.sharding.planning.infeasible import (
    InfeasiblePlan,
    fits_alone,
    no_choice_fits,
    too_much_together,
    try_all,
)
from lightning_distrec.sharding.planning.partial_plan import MemoryBudget, PartialPlan
from lightning_distrec.sharding.planning.plan import (
    TableConstraints,
    check_sequence_widths,
    constraints_of,
)
from lightning_distrec.sharding.planning.plan_cost import TIME_PARTS, PlanCost
from lightning_distrec.sharding.planning.search import search
from lightning_distrec.sharding.planning.sharding_options import (
    EstimatedOption,
    capacities,
    choices_of,
    estimated,
    unlike,
)
from lightning_distrec.sharding.sharders import ShardingByTable, sharders
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES
from lightning_distrec.sharding.tables import Table


@dataclass(frozen=True)
class MadePlan:
    """Where tables go, and what that costs."""

    plan: ShardingByTable
    cost: PlanCost
    lower_bound: float | None = None
    """Milliseconds that no plan's critical path is below; None for a plan that was not searched for."""


def make_plan(
    tables: Sequence[Table], demands: Mapping[str, TableConstraints], topology: Topology, batch_size: int, seed: int = 0
) -> MadePlan:
    """Return a place for every table, so that the slowest rank has little to do. Equal input gives equal plans.

    topology: its memory is what tables and their exchange may take: what is reserved for all else is taken off.
    torchrec's estimators say what each way to cut a table costs; the search is ours, see search.py.
    Raises InfeasiblePlanError: the tables do not fit, with the one that finds no room and the bytes that are missing.
    PlanError: what was said of tables cannot be.
    """
    tables = list(tables)
    check_sequence_widths(tables, demands)
    constraints = constraints_of(tables, demands)
    update_bytes = {name: (demand.bytes_per_element, demand.bytes_per_row) for name, demand in demands.items()}
    choices = choices_of(tables, constraints, topology, batch_size, sharders(), update_bytes)
    room = room_of(topology)
    fitting = [[choice for choice in unlike(of_table) if fits_alone(choice, room)] for of_table in choices]
    for number, of_table in enumerate(fitting):
        if not of_table:
            raise InfeasiblePlanError(
                _why_no_plan(tables, no_choice_fits(choices[number], number, room), topology, batch_size)
            )
    shortage = too_much_together(fitting, room)
    found = None if shortage else search(fitting, room, seed)
    if found is None:
        instead = shortage or try_all(fitting, room)
        if isinstance(instead, InfeasiblePlan):
            raise InfeasiblePlanError(_why_no_plan(tables, instead, topology, batch_size))
        found = search(fitting, room, seed, start=instead)
        assert found is not None
    return MadePlan(_as_plan(tables, found.placement, topology), cost_of_placement(found.placement), found.lower_bound)


def room_of(topology: Topology) -> MemoryBudget:
    """Return what tables may take of every rank."""
    return MemoryBudget(*capacities(topology), topology.local_world_size)


def cost_of_plan(
    tables: Sequence[Table],
    plan: ShardingByTable,
    demands: Mapping[str, TableConstraints],
    topology: Topology,
    batch_size: int,
) -> PlanCost:
    """Return what a plan costs that was not searched for here: one from a file, or of an earlier run."""
    tables = list(tables)
    update_bytes = {name: (demand.bytes_per_element, demand.bytes_per_row) for name, demand in demands.items()}
    choices = estimated(tables, plan, constraints_of(tables, demands), topology, batch_size, sharders(), update_bytes)
    placement = PartialPlan([[choice] for choice in choices], room_of(topology))
    for number, table in enumerate(tables):
        ranks = range(topology.world_size) if choices[number].cut in EVERY_RANK_TYPES else plan[table.full_name].ranks
        placement.put(number, 0, np.asarray(ranks, dtype=np.intp))
    return cost_of_placement(placement)


def cost_of_placement(placement: PartialPlan) -> PlanCost:
    """Return what every rank does and holds."""
    room = placement.room
    parts = np.zeros((room.num_ranks, len(TIME_PARTS)))
    for table, ranks in enumerate(placement.ranks):
        choice = placement.choice(table)
        np.add.at(parts, ranks, choice.milliseconds_by_part[choice.which])
    return PlanCost(
        milliseconds=parts,
        device_bytes=room.device_bytes - placement.device_left,
        host_bytes=room.host_bytes - placement.host_left,
        device_bytes_usable=room.device_bytes,
        host_bytes_usable=room.host_bytes,
    )


def _as_plan(tables: Sequence[Table], placement: PartialPlan, topology: Topology) -> ShardingByTable:
    return {
        table.full_name: _as_sharding(placement.choice(number), placement.ranks[number].tolist(), topology)
        for number, table in enumerate(tables)
    }


def _as_sharding(choice: EstimatedOption, ranks: list[int], topology: Topology) -> ParameterSharding:
    spec = None
    if choice.cut != "data_parallel":
        spec = EnumerableShardingSpec([
            ShardMetadata(
                shard_sizes=list(size),
                shard_offsets=list(offset),
                placement=place_name(topology.compute_device, rank, topology.local_world_size),
            )
            for size, offset, rank in zip(choice.sizes, choice.offsets, ranks, strict=True)
        ])
    return ParameterSharding(
        sharding_type=choice.cut,
        compute_kernel=choice.kernel,
        ranks=ranks,
        sharding_spec=spec,
        cache_params=choice.cache_params,
    )


def _why_no_plan(tables: Sequence[Table], shortage: InfeasiblePlan, topology: Topology, batch_size: int) -> str:
    sizes = [table.parameter.numel() * table.parameter.element_size() for table in tables]
    usable = int(capacities(topology)[0].min())
    found = "no plan can exist" if shortage.proven else "no plan was found, which does not prove that there is none"
    return (
        f"the tables do not fit: table '{tables[shortage.table].full_name}' {shortage.why}. There are {len(tables)} "
        f"tables of {sum(sizes):,} bytes, and {topology.world_size} ranks with at least {usable:,} bytes each for "
        f"tables, what updates them and their exchange at batch_size_per_rank={batch_size} (memory_bytes_per_rank less "
        f"planning.reserve): {found}. Use more ranks, allow more ways to cut the table (sharding_types), or give "
        "more memory."
    )
