"""Whether a written plan suits the tables and the ranks of a run, told as a difference that people can read."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.plan import TableConstraints, allowed_types
from lightning_distrec.sharding.planning.shard_edges import why_not_placed
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.planning.written_plan import (
    WrittenPlan,
    WrittenShard,
    WrittenTable,
    ranks_per_node,
    size_differences,
    size_of,
)
from lightning_distrec.sharding.tables import Table
from lightning_distrec.units import quantity

NUM_LISTED = 10
"""How many differences a message lists."""


def fitting_plan(
    plan: WrittenPlan,
    what: str,
    tables: list[Table],
    demands: Mapping[str, TableConstraints],
    places: NodeLayout,
    device: str,
    resting: Collection[str],
) -> WrittenPlan:
    """Return the plan for these tables, in their order, with what this run's ranks have.

    what: what the plan is called in messages. device: type of the ranks' devices. resting: full names of tables that
    nothing updates in this run; where the plan has each rank hold one of them (data_parallel), which only the user's
    optimizer needs, one rank holds it instead.
    Raises PlanError: the plan is for other tables or another number of ranks, or a table cannot be where it says; with
    all differences.
    """
    wrong = []
    if plan.num_ranks != places.num_ranks:
        wrong.append(f"it is for {quantity(plan.num_ranks, 'rank')}, and there {_are(places.num_ranks)}")
    wanted = {table.full_name: size_of(table) for table in tables}
    wrong += size_differences({name: t.size for name, t in plan.tables.items()}, wanted, "the plan", "the module")
    if not wrong:
        plan = _with_one_holder(plan, [n for n in resting if "table_wise" in demands[n].sharding_types])
        for table in tables:
            written = plan.tables[table.full_name]
            reason = _why_not(table, written, demands[table.full_name], places, device)
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
    return WrittenPlan(places.num_ranks, ranks_per_node(places), device, ordered)


def _are(num_ranks: int) -> str:
    return "is 1" if num_ranks == 1 else f"are {num_ranks:,}"


def _why_not(table: Table, written: WrittenTable, demand: TableConstraints, places: NodeLayout, device: str) -> str:
    cut, kernel = written.sharding_type, written.compute_kernel
    by_user = demand.options.sharding_types
    if by_user is not None and cut not in by_user:
        return f"is cut {cut}, and sharding_types={by_user} does not allow that"
    if by_user is None and cut == "data_parallel":
        return (
            "is data_parallel, so that the user's own optimizer must update it; say so by "
            "sharding_types=['data_parallel'] for the table"
        )
    if cut != "data_parallel":
        try:
            # min_partition is about widths, which the plan says itself
            allowed_types(
                table, replace(demand.options, sharding_types=[cut], min_partition=None), places, demand.whole_rows_for
            )
        except PlanError as error:
            reason = str(error).removeprefix(f"table '{table.full_name}': ").rstrip(".")
            return f"cannot be cut {reason}"
    if reason := why_not_placed(written, places.num_ranks, ranks_per_node(places)):
        return f"cannot have these shards on {quantity(ranks_per_node(places), 'rank')} a node: {reason}"
    if kernel.startswith("fused_uvm") and demand.kept_gradient:
        return (
            f"has the kernel {kernel}, which a table has not whose gradient the user's own optimizer needs; use fused"
        )
    if kernel.startswith("fused_uvm") and device == "cpu":
        return f"has the kernel {kernel}, by which a GPU reads its host's memory, and the ranks have no GPU; use fused"
    return ""


def _with_one_holder(plan: WrittenPlan, resting: Collection[str]) -> WrittenPlan:
    """Return the plan with data_parallel tables of these on one rank each, the one with the fewest elements so far."""
    held = [0] * plan.num_ranks
    for table in plan.tables.values():
        for shard in table.shards:
            held[shard.rank] += shard.sizes[0] * shard.sizes[1]
    tables = dict(plan.tables)
    for name in (n for n in plan.tables if n in resting and tables[n].sharding_type == "data_parallel"):
        table = tables[name]
        rank = min(range(plan.num_ranks), key=held.__getitem__)
        held[rank] += table.size.rows * table.size.dim
        whole = WrittenShard(rank, (0, 0), (table.size.rows, table.size.dim))
        tables[name] = replace(table, sharding_type="table_wise", compute_kernel="fused", shards=(whole,))
    return replace(plan, tables=tables)


def _unequal_widths(tables: list[Table], plan: WrittenPlan) -> list[str]:
    """torchrec needs one width for all column-wise shards of an EmbeddingCollection."""
    widths: dict[str, set[int]] = {}
    for table in tables:
        written = plan.tables[table.full_name]
        if not table.pooled and written.sharding_type == "column_wise":
            widths.setdefault(table.collection, set()).update(shard.sizes[1] for shard in written.shards)
    return [
        f"tables of the EmbeddingCollection '{path}' are cut column_wise into shards of {sorted(found)} columns, and "
        "torchrec needs one width for all of them"
        for path, found in widths.items()
        if len(found) > 1
    ]
