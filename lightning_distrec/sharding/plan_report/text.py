"""The start table: each table with its sharding type, ranks and update, and what the plan costs per rank."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from rich.console import Console, JustifyMethod
from rich.table import Table as TextTable

from lightning_distrec.sharding.node_layout import NodeLayout
from lightning_distrec.sharding.plan.planned_table import PlannedTable
from lightning_distrec.sharding.plan.sharding_plan import PlanCost, ShardingPlan
from lightning_distrec.sharding.plan.traffic import Traffic
from lightning_distrec.sharding.plan_report.names import TableName, narrowest_width
from lightning_distrec.sharding.plan_report.sentences import replicas_in_words, updates_in_words
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.units import format_bytes, format_ranks, quantity

NARROWEST_COLUMNS = 150
"""Width of the printed table where the output is no terminal."""
MAX_TABLES = 60
"""Number of printed tables; of more, the largest are printed."""
MAX_RANKS = 8
"""Number of ranks that are listed one by one."""


def print_plan(
    plan: ShardingPlan,
    output_dtype: torch.dtype | None = None,
    planned_with: str = "",
    left_alone: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """Print the start table. Call it on one rank.

    output_dtype: the type of looked up rows; None for float32. planned_with: a line about the planner's inputs.
    left_alone: path -> reason, of modules with tables that are not sharded.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=NARROWEST_COLUMNS, file=console.file)
    tables = list(plan.tables.values())
    text = TextTable(
        title=_title(plan.layout),
        title_justify="left",
        caption=_memory(plan)
        + _types(tables, output_dtype)
        + _comms(plan.comms)
        + _time(plan.cost)
        + (f"\n{updates}" if (updates := updates_in_words(plan)) else "")
        + _sent(plan.traffic)
        + (f"\n{replicas}" if (replicas := replicas_in_words(plan)) else "")
        + _deduplicated(tables)
        + _rest(tables)
        + (f"\n{planned_with}" if planned_with else "")
        + _left_alone(left_alone or {}),
        caption_justify="left",
    )
    for heading in ("table", "rows x dim", "sharding type", "ranks", "largest shard", "update", "why"):
        justify: JustifyMethod = "right" if heading in ("rows x dim", "largest shard") else "left"
        text.add_column(heading, justify=justify, overflow="fold")
    printed = _printed(tables)
    narrowest = narrowest_width(table.name for table in printed)
    for table in printed:
        text.add_row(
            TableName(table.name, narrowest),
            f"{table.num_rows:,} x {table.dim}",
            table.sharding_type,
            some_ranks_in_words(np.unique(table.ranks).tolist()),
            format_bytes(table.largest_shard_bytes),
            table.update,
            table.update_reason,
        )
    console.print(text)


def some_ranks_in_words(ranks: list[int]) -> str:
    """Return the ranks one by one, or their number and range where there are many. ranks: sorted."""
    text = format_ranks(ranks)
    return text if text.count(",") < MAX_RANKS else f"{len(ranks)} of {ranks[0]}-{ranks[-1]}"


def _printed(tables: Sequence[PlannedTable]) -> Sequence[PlannedTable]:
    """Return the tables that are printed, in their order."""
    if len(tables) <= MAX_TABLES:
        return tables
    largest = sorted(tables, key=lambda table: -table.num_rows * table.dim)[:MAX_TABLES]
    names = {table.name for table in largest}
    return [table for table in tables if table.name in names]


def _rest(tables: Sequence[PlannedTable]) -> str:
    more = len(tables) - MAX_TABLES
    return f"\n{quantity(more, 'smaller table')} not shown; the callback PlanLogger writes them all" if more > 0 else ""


def _deduplicated(tables: Sequence[PlannedTable]) -> str:
    """Return a line about tables whose repeated ids are sent once."""
    found = [f"{table.name} ({table.distinct_share:.0%} are different)" for table in tables if table.deduplicated]
    more = f" and {len(found) - MAX_RANKS} more" if len(found) > MAX_RANKS else ""
    return f"\nIds that a batch repeats are sent once: {', '.join(found[:MAX_RANKS])}{more}" if found else ""


def _left_alone(reasons: Mapping[str, str]) -> str:
    lines = [f"\n'{path}' is not sharded, every rank has all of it: {why}" for path, why in reasons.items()]
    more = [f"\n{quantity(len(lines) - MAX_TABLES, 'more module')} not sharded"] if len(lines) > MAX_TABLES else []
    return "".join(lines[:MAX_TABLES] + more)


def _time(cost: PlanCost) -> str:
    """Return a line about the estimated time of a step, if it is known."""
    if not cost.known:
        return ""
    by_rank = cost.milliseconds_by_rank
    line = f"\nEstimated time for tables, per step: {cost.critical_path:.3g} ms"
    if len(by_rank) == 1:
        return line
    mean = float(by_rank.mean())
    if cost.critical_path <= 1.005 * mean:
        return f"{line} on every rank"
    slowest, alone = int(by_rank.argmax()), float(by_rank.max())
    if cost.critical_path <= 1.005 * alone:
        return f"{line} on the slowest rank ({slowest}), {mean:.3g} ms on average"
    waits = "each exchange waits for its slowest rank"
    return f"{line}: {waits}; rank {slowest} is busy for {alone:.3g} ms of it, {mean:.3g} ms on average"


def _sent(traffic: Traffic) -> str:
    """Return a line about what ranks send, where there are several."""
    if traffic.layout.num_ranks == 1:
        return ""
    sent, within, across = traffic.sent(), traffic.within_node(), traffic.across_nodes()
    nodes = ""
    if traffic.layout.num_nodes > 1:
        nodes = f" ({format_bytes(within.mean())} within its node, {format_bytes(across.mean())} across nodes)"
    largest = f"; most by rank {int(sent.argmax())}: {format_bytes(sent.max())}" if sent.max() > sent.min() else ""
    return f"\nEstimated bytes sent for tables, per rank and step: {format_bytes(sent.mean())}{nodes}{largest}"


def _title(layout: NodeLayout) -> str:
    num_ranks = layout.num_ranks
    if layout.num_replicas > 1:
        return f"Embedding tables over {quantity(num_ranks, 'rank')} in each of {layout.num_replicas} groups"
    return f"Embedding tables over {'1 rank: nothing is sharded' if num_ranks == 1 else f'{num_ranks} ranks'}"


def _memory(plan: ShardingPlan) -> str:
    held = plan.table_bytes()
    per_rank = ", ".join(f"rank {rank}: {format_bytes(total)}" for rank, total in enumerate(held[:MAX_RANKS]))
    more = f" ... largest {format_bytes(held.max())}" if len(held) > MAX_RANKS else ""
    return f"Memory for tables, gradients and optimizer state: {per_rank}{more}"


def _comms(comms: QuantizedComms) -> str:
    """Return a line about the types in which rows are sent, where they are rounded."""
    if comms.is_exact:
        return ""
    ways = f"rows are sent as {comms.forward}, their gradients as {comms.backward}"
    return f"\nquantized_comms: {ways}, which rounds them"


def _types(tables: Sequence[PlannedTable], output_dtype: torch.dtype | None) -> str:
    """Return a line about types, unless all are float32."""
    rows = list(dict.fromkeys(_row_type(table) for table in tables))
    if rows == ["float32"] and output_dtype is None:
        return ""
    looked_up = "" if output_dtype is None else f" and are looked up as {_short(output_dtype)}"
    names = {kind: [table.name for table in tables if _row_type(table) == kind] for kind in rows}
    of = "" if len(rows) == 1 else "; ".join(f" {kind}: {', '.join(names[kind])}" for kind in rows[1:])
    return f"\nrows are {' or '.join(rows)}{looked_up}{f' ({of.strip()})' if of else ''}"


def _row_type(table: PlannedTable) -> str:
    return f"float{8 * table.element_bytes}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
