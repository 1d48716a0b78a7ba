"""A dry run for people, as a page of text, and for programs, as JSON."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.advice.dry_run import DryRun
from lightning_distrec.advice.limit_search import Edge
from lightning_distrec.advice.limits import MOST_BATCH, MOST_RANKS
from lightning_distrec.sharding.plan_report.facts import PlanFacts
from lightning_distrec.sharding.plan_report.sentences import milliseconds_in_words
from lightning_distrec.sharding.planning.plan_cost import TIME_PARTS
from lightning_distrec.sharding.planning.traffic import TRAFFIC_KINDS
from lightning_distrec.units import format_bytes, quantity

MOST_LETTERS = 300
"""Of a reason for what does not fit."""
Vector = NDArray[Any]


def print_dry_run(found: DryRun, console: Console) -> None:
    """Print whether it fits, what each rank does, how far the batch and the nodes can go, and what was assumed."""
    job = found.job
    ranks = f"{quantity(job.places.num_ranks, 'rank')} on {quantity(job.num_nodes, 'node')}"
    tables = f"{quantity(found.num_tables, 'table')} of {format_bytes(found.table_bytes)}"
    console.print(
        f"{'FITS' if found.fits else 'DOES NOT FIT'}: {tables} on {ranks}, {found.batch_size:,} examples each"
    )
    if not found.fits:
        console.print(found.why_not)
    if found.facts is not None:
        console.print(_ranks(found.facts))
    if found.largest_batch is not None:
        console.print(_batch_in_words(found.largest_batch))
    if found.fewest_nodes is not None:
        console.print(_nodes_in_words(found.fewest_nodes, job.ranks_on_node))
    console.print(f"{found.planned_with}.")
    console.print(f"Reckoned, not measured: {'; '.join(found.said)}.")


def _ranks(facts: PlanFacts) -> TextTable:
    text = TextTable(title="Of a rank, for tables in a step", title_justify="left")
    text.add_column("")
    for heading in ("least", "mean", "most", "on rank"):
        text.add_column(heading, justify="right")
    for what, values, said in _columns(facts):
        worst = int(values.argmax())
        text.add_row(what, *(said(float(of)) for of in (values.min(), values.mean(), values[worst])), f"{worst:,}")
    return text


def _columns(facts: PlanFacts) -> list[tuple[str, Vector, Callable[[float], str]]]:
    memory, traffic = facts.memory, facts.traffic
    columns: list[tuple[str, Vector, Callable[[float], str]]] = [
        ("memory for tables", memory.tables, format_bytes),
        ("... of what is usable", memory.tables / np.maximum(memory.usable, 1), "{:.1%}".format),
    ]
    if facts.host_memory is not None:
        columns.append(("host memory for tables", facts.host_memory.tables, format_bytes))
    if facts.cost is not None:
        columns.append(("estimated time", facts.cost.milliseconds_by_rank, milliseconds_in_words))
    columns.append(("sent within its node", traffic.within_node(), format_bytes))
    if facts.places.num_nodes > 1:
        columns.append(("sent to other nodes", traffic.across_nodes(), format_bytes))
    return columns


def _batch_in_words(edge: Edge) -> str:
    said = "Largest batch of a rank: "
    if edge.found is None:
        said += "none was found to fit"
    elif edge.beyond is None and not edge.stopped:
        said += f"no limit was met up to {edge.found:,} examples" if edge.found >= MOST_BATCH else f"{edge.found:,}"
    else:
        said += f"{'at least ' if edge.beyond is None else ''}{edge.found:,} examples"
    if edge.beyond is not None:
        said += f"; {edge.beyond:,} do not fit: {_short(edge.why)}"
    return _ended(said, edge)


def _nodes_in_words(edge: Edge, ranks_on_node: int) -> str:
    said = f"Fewest nodes of {quantity(ranks_on_node, 'rank')}: "
    if edge.found is None:
        said += "none were found that do" if edge.stopped else f"none up to {MOST_RANKS // ranks_on_node:,} do"
    else:
        said += f"{'at most ' if edge.stopped else ''}{edge.found:,}"
    if edge.beyond is not None:
        said += f"; {edge.beyond:,} {'does' if edge.beyond == 1 else 'do'} not: {_short(edge.why)}"
    elif edge.found not in (None, 1) and not edge.stopped:
        said += "; fewer have less memory than the tables' rows and their updates take"
    return _ended(said, edge)


def _ended(said: str, edge: Edge) -> str:
    said = said.rstrip(".")
    return f"{said}. The search ended early: {edge.stopped}." if edge.stopped else f"{said}."


def _short(why: str) -> str:
    """Return what a message has to say of the table, or the rank."""
    said = why.removeprefix("the tables do not fit: ").split(". ")[0]
    return said if len(said) <= MOST_LETTERS else f"{said[:MOST_LETTERS]}..."


def as_json(found: DryRun) -> dict[str, Any]:
    """Return all of a dry run as plain values: bytes, milliseconds."""
    job = found.job
    return {
        "fits": found.fits,
        "why_not": found.why_not or None,
        "num_nodes": job.num_nodes,
        "ranks_per_node": job.ranks_on_node,
        "device": job.device.type,
        "memory_bytes_per_rank": job.memory_bytes,
        "batch_size_per_rank": found.batch_size,
        "num_tables": found.num_tables,
        "table_bytes": found.table_bytes,
        "ranks": None if found.facts is None else _ranks_as_json(found.facts),
        "largest_batch": _edge_as_json(found.largest_batch),
        "fewest_nodes": _edge_as_json(found.fewest_nodes),
        "planning_seconds": round(found.seconds, 3),
        "planned_with": [list(origin) for origin in found.origins],
        "assumed": found.said,
    }


def _ranks_as_json(facts: PlanFacts) -> dict[str, Any]:
    """Return what each rank does: lists by rank."""
    memory, traffic, cost = facts.memory, facts.traffic, facts.cost
    told: dict[str, Any] = {
        "memory_bytes": memory.tables.tolist(),
        "usable_bytes": memory.usable.tolist(),
        "host_memory_bytes": None if facts.host_memory is None else facts.host_memory.tables.tolist(),
        "sent_within_node_bytes": _rounded(traffic.within_node()),
        "sent_across_nodes_bytes": _rounded(traffic.across_nodes()),
        "sent_bytes_by_kind": {kind: _rounded(traffic.sent(kind)) for kind in TRAFFIC_KINDS},
    }
    if cost is not None:
        told["milliseconds"] = [round(float(of), 6) for of in cost.milliseconds_by_rank]
        told["milliseconds_by_part"] = {
            part: [round(float(of), 6) for of in cost.milliseconds[:, number]] for number, part in enumerate(TIME_PARTS)
        }
    return told


def _rounded(values: Vector) -> list[int]:
    rounded: list[int] = np.rint(values).astype(np.int64).tolist()
    return rounded


def _edge_as_json(edge: Edge | None) -> dict[str, Any] | None:
    if edge is None:
        return None
    return {
        "fits": edge.found,
        "does_not_fit": edge.beyond,
        "why_not": edge.why or None,
        "plans_tried": edge.tries,
        "ended_early": edge.stopped or None,
    }
