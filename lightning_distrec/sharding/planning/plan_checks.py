"""Checks a plan against a run: the tables and ranks it was made for, and the memory that ranks have."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.node_layout import NodeLayout
from lightning_distrec.sharding.plan.plan_differences import size_differences
from lightning_distrec.sharding.plan.planned_table import PlannedShard, PlannedTable
from lightning_distrec.sharding.plan.shard_edges import why_not_placed
from lightning_distrec.sharding.plan.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.constraints import TableConstraints, allowed_types
from lightning_distrec.sharding.planning.reservation import Reservation
from lightning_distrec.sharding.planning.topology import RankMemory
from lightning_distrec.sharding.sharding_types import HOST_KERNELS
from lightning_distrec.sharding.tables import Table
from lightning_distrec.units import format_bytes, quantity

NUM_LISTED = 10
"""How many differences a message lists."""


def check_memory(plan: ShardingPlan, memory: RankMemory, reservation: Reservation) -> None:
    """Raise InfeasiblePlanError where a rank would hold more for its tables than it has.

    Plans of the planner fit; those of files and of earlier runs may not. The planner alone counts the host's memory
    for tables that a GPU reads from there.
    """
    usable = memory.less(reservation).device_bytes
    needed = plan.table_bytes()
    worst = int((needed - np.asarray(usable)).argmax())
    if needed[worst] > usable[worst]:
        raise InfeasiblePlanError(
            f"rank {worst} would hold {format_bytes(needed[worst])} for its tables (rows, gradients, optimizer state), "
            f"but has {format_bytes(usable[worst])} (memory_bytes_per_rank={memory.device_bytes[worst]:,} less "
            f"{reservation.in_words}). Use more ranks, or an optimizer with a fused update (SGD, Adagrad, "
            "RowWiseAdagrad), which keeps no gradient."
        )


def plan_for_run(
    plan: ShardingPlan,
    what: str,
    tables: list[Table],
    constraints: Mapping[str, TableConstraints],
    layout: NodeLayout,
    device: str,
    frozen: Collection[str],
) -> ShardingPlan:
    """Return a file's plan for these tables, in their order, on the ranks of this run.

    what: what messages call the plan. device: type of the ranks' devices. frozen: full names of tables that nothing
    updates in this run; those that the plan has data_parallel, which only the user's optimizer needs, become
    table_wise.
    Raises PlanError: the plan is for other tables or another number of ranks, or a table cannot be sharded as it says;
    with all differences.
    """
    wrong = []
    if plan.num_ranks != layout.num_ranks:
        are = "is 1" if layout.num_ranks == 1 else f"are {layout.num_ranks:,}"
        wrong.append(f"it is for {quantity(plan.num_ranks, 'rank')}, and there {are}")
    wanted = {
        table.full_name: f"{c.num_embeddings:,} x {c.embedding_dim:,} {c.data_type.value}"
        for table in tables
        for c in [table.config]
    }
    planned = {name: table.size for name, table in plan.tables.items()}
    wrong += size_differences(planned, wanted, "the plan", "the module")
    if not wrong:
        plan = _unreplicated(plan, [name for name in frozen if "table_wise" in constraints[name].sharding_types])
        for table in tables:
            in_plan = plan.tables[table.full_name]
            reason = _why_not(table, in_plan, constraints[table.full_name], layout, device)
            wrong += [f"table '{table.full_name}' {reason}"] if reason else []
        wrong += _unequal_widths(tables, plan)
    if wrong:
        more = [f"and {len(wrong) - NUM_LISTED} more"] if len(wrong) > NUM_LISTED else []
        lines = "".join(f"\n  - {line}" for line in [*wrong[:NUM_LISTED], *more])
        raise PlanError(
            f"{what} does not suit this run:{lines}\nName the plan of a run like this one, change the file, or leave "
            "plan_file out."
        )
    ordered = {table.full_name: plan.tables[table.full_name] for table in tables}
    return replace(plan, layout=layout, device=device, tables=ordered)


def _why_not(
    table: Table, planned: PlannedTable, constraints: TableConstraints, layout: NodeLayout, device: str
) -> str:
    sharding_type, kernel = planned.sharding_type, planned.compute_kernel
    by_user = constraints.options.sharding_types
    if by_user is not None and sharding_type not in by_user:
        return f"is {sharding_type}, and sharding_types={by_user} does not allow that"
    if by_user is None and sharding_type == "data_parallel":
        return (
            "is data_parallel, so that the user's own optimizer must update it; allow that by "
            "sharding_types=['data_parallel'] for the table"
        )
    if sharding_type != "data_parallel":
        try:
            # min_partition is about widths, which the plan itself has
            options = replace(constraints.options, sharding_types=[sharding_type], min_partition=None)
            allowed_types(table, options, layout, constraints.unsplit_rows_for)
        except PlanError as error:
            reason = str(error).removeprefix(f"table '{table.full_name}': ").rstrip(".")
            return f"cannot be sharded {reason}"
    if reason := why_not_placed(planned, layout.num_ranks, layout.ranks_per_node):
        return f"cannot have these shards on {quantity(layout.ranks_per_node, 'rank')} per node: {reason}"
    if kernel in HOST_KERNELS and constraints.kept_gradient:
        return f"has the kernel {kernel}, with which the user's own optimizer gets no gradient; use fused"
    if kernel in HOST_KERNELS and device == "cpu":
        return f"has the kernel {kernel}, by which a GPU reads its host's memory, and the ranks have no GPU; use fused"
    return ""


def _unreplicated(plan: ShardingPlan, names: Collection[str]) -> ShardingPlan:
    """Return the plan with the data_parallel tables among `names` table_wise, on the ranks with the fewest elements."""
    elements = [0] * plan.num_ranks
    for table in plan.tables.values():
        for shard in table.shards:
            elements[shard.rank] += shard.sizes[0] * shard.sizes[1]
    tables = dict(plan.tables)
    for name, table in plan.tables.items():
        if name in names and table.sharding_type == "data_parallel":
            rank = min(range(plan.num_ranks), key=elements.__getitem__)
            elements[rank] += table.num_rows * table.dim
            shard = PlannedShard(rank, (0, 0), (table.num_rows, table.dim))
            tables[name] = replace(table, sharding_type="table_wise", compute_kernel="fused", shards=(shard,))
    return replace(plan, tables=tables)


def _unequal_widths(tables: list[Table], plan: ShardingPlan) -> list[str]:
    """Return a line for each EmbeddingCollection with column-wise shards of several widths; torchrec needs one."""
    widths: dict[str, set[int]] = {}
    for table in tables:
        planned = plan.tables[table.full_name]
        if not table.pooled and planned.sharding_type == "column_wise":
            widths.setdefault(table.collection, set()).update(shard.sizes[1] for shard in planned.shards)
    return [
        f"tables of the EmbeddingCollection '{path}' have column_wise shards of {sorted(found)} columns, and torchrec "
        "needs one width for all of them"
        for path, found in widths.items()
        if len(found) > 1
    ]
