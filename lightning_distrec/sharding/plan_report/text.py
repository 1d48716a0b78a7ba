"""A plan as text: what each table is, where its shards are, what it costs per rank, and what updates it."""

from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.sharding.plan_report.facts import PlanFacts
from lightning_distrec.sharding.planning.held_memory import held_bytes
from lightning_distrec.sharding.planning.plan_cost import PlanCost
from lightning_distrec.sharding.planning.planned_tables import PlannedTable
from lightning_distrec.sharding.planning.traffic import Traffic
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.units import format_bytes, format_ranks, quantity

NARROWEST_COLUMNS = 150
"""Width of the printed table where the output is no terminal."""
MOST_TABLES = 60
"""So many tables are printed; of more, the largest."""
MOST_RANKS = 8
"""So many ranks are named one by one."""


def print_plan(
    facts: PlanFacts,
    output_dtype: torch.dtype | None = None,
    planned_with: str = "",
    console: Console | None = None,
) -> None:
    """Print the start table. Call it on one rank.

    output_dtype: the type of looked up rows; None for float32. planned_with: a line about what the planner went by.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=NARROWEST_COLUMNS, file=console.file)
    text = TextTable(
        title=_title(facts.places.num_ranks),
        title_justify="left",
        caption=_memory(facts)
        + _types(facts.tables, output_dtype)
        + _travel(facts.comms)
        + _time(facts.cost)
        + _sent(facts.traffic)
        + _rest(facts.tables)
        + (f"\n{planned_with}" if planned_with else ""),
        caption_justify="left",
    )
    for heading in ("table", "rows x dim", "cut", "on ranks", "largest shard", "update", "why"):
        text.add_column(heading, justify="right" if heading in ("rows x dim", "largest shard") else "left")
    for table in _printed(facts.tables):
        text.add_row(
            table.name,
            f"{table.num_rows:,} x {table.dim}",
            table.cut,
            some_ranks_in_words(np.unique(table.ranks).tolist()),
            format_bytes(table.largest_shard_bytes),
            table.update,
            table.why,
        )
    console.print(text)


def some_ranks_in_words(ranks: list[int]) -> str:
    """Return the ranks one by one, or how many they are where that would fill a line. ranks: sorted."""
    said = format_ranks(ranks)
    return said if said.count(",") < MOST_RANKS else f"{len(ranks)} of {ranks[0]}-{ranks[-1]}"


def _printed(tables: Sequence[PlannedTable]) -> Sequence[PlannedTable]:
    """Return the tables that are printed, in their order."""
    if len(tables) <= MOST_TABLES:
        return tables
    largest = sorted(tables, key=lambda table: -table.num_rows * table.dim)[:MOST_TABLES]
    names = {table.name for table in largest}
    return [table for table in tables if table.name in names]


def _rest(tables: Sequence[PlannedTable]) -> str:
    more = len(tables) - MOST_TABLES
    return f"\n{quantity(more, 'smaller table')} not shown; the callback PlanLogger writes them all" if more > 0 else ""


def _time(cost: PlanCost | None) -> str:
    """Return a line about the estimated time of a step, where it is known."""
    if cost is None:
        return ""
    by_rank = cost.milliseconds_by_rank
    said = f"\nEstimated time for tables in a step: {cost.critical_path:.3g} ms"
    if len(by_rank) == 1:
        return said
    mean = float(by_rank.mean())
    if cost.critical_path <= 1.005 * mean:
        return f"{said} on every rank"
    return f"{said} on the slowest rank ({int(by_rank.argmax())}), {mean:.3g} ms in the mean of ranks"


def _sent(traffic: Traffic) -> str:
    """Return a line about what ranks send, where there are several."""
    if traffic.places.num_ranks == 1:
        return ""
    sent, within, across = traffic.sent(), traffic.within_node(), traffic.across_nodes()
    nodes = ""
    if traffic.places.num_nodes > 1:
        nodes = f" ({format_bytes(within.mean())} within its node, {format_bytes(across.mean())} across nodes)"
    most = f"; the most, {format_bytes(sent.max())}, by rank {int(sent.argmax())}" if sent.max() > sent.min() else ""
    return f"\nSent for tables by a rank in a step, estimated: {format_bytes(sent.mean())}{nodes}{most}"


def _title(num_ranks: int) -> str:
    return f"Embedding tables over {'1 rank: nothing is shared out' if num_ranks == 1 else f'{num_ranks} ranks'}"


def _memory(facts: PlanFacts) -> str:
    held = held_bytes(facts.tables, facts.places.num_ranks)
    per_rank = ", ".join(f"rank {rank}: {format_bytes(total)}" for rank, total in enumerate(held[:MOST_RANKS]))
    more = f" ... largest {format_bytes(held.max())}" if len(held) > MOST_RANKS else ""
    return f"Memory for tables, gradients and optimizer state: {per_rank}{more}"


def _travel(comms: QuantizedComms) -> str:
    """Return a line about how rows travel, where they are rounded for it."""
    if comms.is_exact:
        return ""
    ways = f"rows travel as {comms.forward}, their gradients as {comms.backward}"
    return f"\nquantized_comms: {ways}: not the same numbers"


def _types(tables: Sequence[PlannedTable], output_dtype: torch.dtype | None) -> str:
    """Return a line about types where they are not all float32."""
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
