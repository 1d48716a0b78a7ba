"""Checks that plans have memory, suit a run, and have shards that cover their tables as torchrec
expects."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lightning_distrec.errors import InfeasiblePlanError, PlanError, did_you_mean
from lightning_distrec.sharding.planning.constraints import TableConstraints, type_obstacle
from lightning_distrec.sharding.planning.planned_table import PlannedShard, PlannedTable
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.topology import RankMemory, Reservation
from lightning_distrec.sharding.sharders import (
    COLUMN_TYPES,
    HOST_KERNELS,
    ONE_NODE_TYPES,
    ROW_TYPES,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table
from lightning_distrec.units import format_bytes, quantity

NUM_LISTED = 10
"""How many differences a message lists."""


def check_memory(plan: ShardingPlan, memory: RankMemory, reservation: Reservation) -> None:
    """Raise InfeasiblePlanError where a rank would hold more for its tables than it has: a plan of
    a file may."""
    # Without the exchange and without caches, whose sizes a file does not have: what is refused
    # here cannot fit.
    usable = memory.less(reservation).device_bytes
    needed = plan.table_bytes()
    worst = int((needed - np.asarray(usable)).argmax())
    if needed[worst] > usable[worst]:
        raise InfeasiblePlanError(
            f"rank {worst} would hold {format_bytes(needed[worst])} for its tables (rows, "
            f"gradients, optimizer state), but has {format_bytes(usable[worst])} "
            f"(memory_bytes_per_rank={memory.device_bytes[worst]:,} less {reservation.in_words}). "
            "Use more ranks, or an optimizer with a fused update (SGD, Adagrad, RowWiseAdagrad), "
            "which keeps no gradient."
        )


def plan_for_run(
    plan: ShardingPlan,
    description: str,
    tables: list[Table],
    *,
    constraints: Mapping[str, TableConstraints],
    layout: NodeLayout,
    device: str,
) -> ShardingPlan:
    """Return a file's plan for these tables, in their order, on the ranks of this run.

    description: the plan, for messages. Tables that nothing updates in this run, and that the plan
    has data_parallel, which only the user's optimizer needs, become table_wise.
    Raises PlanError: the plan is for other tables or ranks, or a table cannot be sharded as it
    says; all differences.
    """
    wrong = []
    if plan.num_ranks != layout.num_ranks:
        are = "is 1" if layout.num_ranks == 1 else f"are {layout.num_ranks:,}"
        wrong.append(f"it is for {quantity(plan.num_ranks, 'rank')}, and there {are}")
    sizes = {}
    for table in tables:
        rows = table.config.num_embeddings
        dim = table.config.embedding_dim
        sizes[table.full_name] = f"{rows:,} x {dim:,} {table.config.data_type.value}"
    wrong += _size_differences({name: table.size for name, table in plan.tables.items()}, sizes)
    # Tables can be compared one by one only where the plan has the same tables, for the same number
    # of ranks.
    if not wrong:
        plan = _unreplicated(plan, constraints)
        for table in tables:
            in_plan = plan.tables[table.full_name]
            reason = _table_misfit(table, in_plan, constraints[table.full_name], layout, device)
            if reason:
                wrong.append(f"table '{table.full_name}' {reason}")
        wrong += _unequal_widths(tables, plan)
    if wrong:
        remainder = [f"and {len(wrong) - NUM_LISTED} more"] if len(wrong) > NUM_LISTED else []
        lines = "".join(f"\n  - {line}" for line in [*wrong[:NUM_LISTED], *remainder])
        raise PlanError(
            f"{description} does not suit this run:{lines}\nName the plan of a run like this one, "
            "change the file, or leave plan_file out."
        )
    ordered = {table.full_name: plan.tables[table.full_name] for table in tables}
    return replace(plan, layout=layout, device=device, tables=ordered)


def _size_differences(planned: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Return which tables are on one side only, with near matches on the other, and which differ in
    size."""
    lines = []
    sides = ((planned, actual, "the plan"), (actual, planned, "the module"))
    for sizes, other_sizes, side in sides:
        # Near matches come from names that only the other side has: a table that both have was not
        # renamed.
        new = [name for name in other_sizes if name not in sizes]
        for name in sizes:
            if name not in other_sizes:
                near = did_you_mean(name, new).rstrip(".")
                lines.append(f"table '{name}' is in {side} only{near}")
    for name, size in planned.items():
        if actual.get(name, size) != size:
            lines.append(f"table '{name}' is {size} in the plan, {actual[name]} in the module")
    return lines


def _table_misfit(
    table: Table,
    planned: PlannedTable,
    constraints: TableConstraints,
    layout: NodeLayout,
    device: str,
) -> str:
    sharding_type = planned.sharding_type
    kernel = planned.compute_kernel
    user_types = constraints.options.sharding_types
    if user_types is not None and sharding_type not in user_types:
        return f"is {sharding_type}, and sharding_types={user_types} does not allow that"
    if user_types is None and sharding_type == "data_parallel":
        return (
            "is data_parallel, so that the user's own optimizer must update it; allow that by "
            "sharding_types=['data_parallel'] for the table"
        )
    if sharding_type != "data_parallel":
        reason = type_obstacle(table, sharding_type, layout, constraints.unsplit_rows_for)
        if reason:
            return f"cannot be sharded {sharding_type}: {reason}"
    reason = placement_error(planned, layout.num_ranks, layout.ranks_per_node)
    if reason:
        return (
            f"cannot have these shards on {quantity(layout.ranks_per_node, 'rank')} per node: "
            f"{reason}"
        )
    if kernel in HOST_KERNELS and constraints.kept_gradient:
        return (
            f"has the kernel {kernel}, with which the user's own optimizer gets no gradient; use "
            "fused"
        )
    if kernel in HOST_KERNELS and device == "cpu":
        return (
            f"has the kernel {kernel}, by which a GPU reads its host's memory, and the ranks have "
            "no GPU; use fused"
        )
    return ""


def _unreplicated(plan: ShardingPlan, constraints: Mapping[str, TableConstraints]) -> ShardingPlan:
    """Return the plan with data_parallel tables that nothing updates table_wise, on the ranks with
    the fewest bytes of rows."""
    loads = plan.table_bytes(updates=False)
    tables = dict(plan.tables)
    for name, table in plan.tables.items():
        may_move = "table_wise" in constraints[name].sharding_types
        is_frozen = constraints[name].update == "frozen"
        if table.sharding_type == "data_parallel" and is_frozen and may_move:
            rank = int(loads.argmin())
            # So that several such tables are not all put on the same rank.
            loads[rank] += table.num_bytes
            shard = PlannedShard(rank, (0, 0), (table.num_rows, table.dim))
            # dense is the kernel of data_parallel alone. Of a frozen table no kernel updates
            # anything.
            tables[name] = replace(
                table, sharding_type="table_wise", compute_kernel="fused", shards=(shard,)
            )
    return replace(plan, tables=tables)


def _unequal_widths(tables: list[Table], plan: ShardingPlan) -> list[str]:
    """Return a line for each EmbeddingCollection with column-wise shards of several widths;
    torchrec needs one."""
    widths_by_collection: dict[str, set[int]] = {}
    for table in tables:
        planned = plan.tables[table.full_name]
        if not table.pooled and planned.sharding_type == "column_wise":
            widths_by_collection.setdefault(table.collection, set()).update(
                shard.sizes[1] for shard in planned.shards
            )
    return [
        f"tables of the EmbeddingCollection '{path}' have column_wise shards of {sorted(widths)} "
        "columns, and torchrec needs one width for all of them"
        for path, widths in widths_by_collection.items()
        if len(widths) > 1
    ]


def placement_error(table: PlannedTable, num_ranks: int, ranks_per_node: int) -> str:
    """Return why torchrec cannot hold a table in these shards; "" where it can."""
    kind = table.sharding_type
    rows = table.num_rows
    dim = table.dim
    if kind == "data_parallel":
        replicas = tuple(PlannedShard(rank, (0, 0), (rows, dim)) for rank in range(num_ranks))
        if table.shards == replicas:
            return ""
        return f"data_parallel: each of {num_ranks} ranks must hold all of the table once"
    strips: dict[tuple[int, int], list[PlannedShard]] = {}
    for shard in table.shards:
        strips.setdefault((shard.offsets[1], shard.sizes[1]), []).append(shard)
    reason = _gap_or_overlap(sorted(strips), dim, "columns")
    for strip in strips.values():
        blocks = [(shard.offsets[0], shard.sizes[0]) for shard in strip]
        reason = reason or _gap_or_overlap(blocks, rows, "rows")
    if reason:
        return reason
    if kind not in COLUMN_TYPES and len(strips) > 1:
        return f"{kind} does not shard columns, and these shards do"
    for (_, width), strip in strips.items():
        if width % 4:
            return f"a shard has {width} columns, and FBGEMM's rows come in multiples of 4"
        if kind in ROW_TYPES:
            reason = _row_block_error(strip, table, num_ranks, ranks_per_node)
            if reason:
                return reason
        elif len(strip) > 1:
            return f"{kind} does not shard rows, and these shards do"
    num_nodes = len({shard.rank // ranks_per_node for shard in table.shards})
    if kind in ONE_NODE_TYPES and num_nodes > 1:
        return f"{kind} keeps a table on one node, and the shards are on {num_nodes}"
    return ""


def _gap_or_overlap(blocks: list[tuple[int, int]], end: int, axis: str) -> str:
    """Return why blocks (first, size), sorted, do not cover 0 to `end` exactly once; "" if they
    do."""
    position = 0
    # The empty block at the end shows a gap before it.
    for first, size in [*blocks, (end, 0)]:
        if first > position:
            return f"{axis} {position} to {first - 1} are in no shard"
        if first < position:
            return f"{axis} {first} to {position - 1} are in shards that overlap"
        position += size
    return ""


def _row_block_error(
    strip: list[PlannedShard], table: PlannedTable, num_ranks: int, ranks_per_node: int
) -> str:
    """Return why the shards of some columns, by their first row, are not the blocks of rows that
    torchrec has."""
    first = 0
    num_blocks = num_ranks
    if table.sharding_type != "row_wise":
        first = strip[0].rank // ranks_per_node * ranks_per_node
        num_blocks = ranks_per_node
    # torchrec finds a row's rank by dividing by this number, so that blocks of other sizes would be
    # looked up wrongly.
    block = -(-table.num_rows // num_blocks)
    has_ranks = [shard.rank for shard in strip] == list(range(first, first + num_blocks))
    if has_ranks and all(shard.sizes[0] == block for shard in strip[:-1]):
        return ""
    return (
        f"{table.sharding_type} gives each of the ranks {first} to {first + num_blocks - 1} one "
        f"block of rows, in the order of the ranks: {block} of {table.num_rows} rows, the last has "
        "fewer"
    )


def bounds_error(shard: PlannedShard, rows: int, dim: int, num_ranks: int) -> str:
    """Return why a shard cannot be one of a table of this size; "" where it can."""
    for axis, offset, size, end in zip(
        ("row", "column"), shard.offsets, shard.sizes, (rows, dim), strict=True
    ):
        if offset + size > end:
            return (
                f"exceeds the table: {axis}s {offset} to {offset + size - 1}, and the last one is "
                f"{end - 1}"
            )
    if shard.rank >= num_ranks:
        return f"is on rank {shard.rank}, and the last one is {num_ranks - 1}"
    return ""
