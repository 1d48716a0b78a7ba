"""Reports of a dry run: text for people, JSON for programs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.advice.dry_run import DryRun, Edge
from lightning_distrec.cluster.host_resources import HostNeeds
from lightning_distrec.sharding.planning.report_text import (
    rank_columns,
    replicas_in_words,
    start_in_words,
)
from lightning_distrec.sharding.planning.sharding_plan import TIME_PARTS, ShardingPlan
from lightning_distrec.sharding.planning.traffic import TRAFFIC_KINDS
from lightning_distrec.units import format_bytes, quantity, text_table

MAX_LETTERS = 300
"""Length of the reason for what does not fit."""
Vector = NDArray[Any]


def print_dry_run(result: DryRun, console: Console) -> None:
    """Print whether the tables fit, what each rank does, the limits of batch and nodes, and the
    assumptions."""
    job = result.job
    ranks = f"{quantity(job.num_ranks, 'rank')} on {quantity(job.num_nodes, 'node')}"
    tables = f"{quantity(result.num_tables, 'table')} of {format_bytes(result.table_bytes)}"
    console.print(
        f"{'FITS' if result.fits else 'DOES NOT FIT'}: {tables} on {ranks}, {result.batch_size:,} "
        "examples per rank"
    )
    if not result.fits:
        console.print(result.misfit)
    if result.plan is not None:
        console.print(_ranks(result.plan))
        console.print(f"{start_in_words(result.plan)}.")
        console.print(_host_needs(result).in_words())
        replicas = replicas_in_words(result.plan)
        if replicas:
            console.print(f"{replicas}.")
    if result.largest_batch is not None:
        name = (
            "Largest batch per rank, by tables and their exchange alone (activations are not "
            "counted)"
        )
        console.print(_edge_in_words(name, result.largest_batch))
    if result.min_nodes is not None:
        console.print(
            _edge_in_words(
                f"Minimum nodes of {quantity(job.ranks_on_node, 'rank')}", result.min_nodes
            )
        )
    console.print(f"{result.planned_with}.")
    console.print(f"Estimated, not measured: {'; '.join(result.assumed)}.")


def _host_needs(result: DryRun) -> HostNeeds:
    job = result.job
    return HostNeeds(
        job.num_ranks, job.ranks_on_node, "nccl" if job.device.type == "cuda" else "gloo"
    )


def _ranks(plan: ShardingPlan) -> TextTable:
    headings = ("", "min", "mean", "max", "max on rank")
    text = text_table(headings, [""], title="Embedding tables, per rank and step")
    for name, values, format_value in rank_columns(plan):
        worst = int(values.argmax())
        text.add_row(
            name,
            *(format_value(float(value)) for value in (values.min(), values.mean(), values[worst])),
            f"{worst:,}",
        )
    return text


def _edge_in_words(name: str, edge: Edge) -> str:
    text = f"{name}: {'no fitting size found' if edge.possible is None else f'{edge.possible:,}'}"
    if edge.impossible is not None:
        text += (
            f"; {edge.impossible:,} {'does' if edge.impossible == 1 else 'do'} not fit: "
            f"{_short(edge.reason)}"
        )
    text = text.rstrip(".")
    return f"{text}. The search ended early: {edge.stopped}." if edge.stopped else f"{text}."


def _short(reason: str) -> str:
    """Return the first sentence of an error, about the table or the rank."""
    # The line has begun with that already.
    text = reason.removeprefix("the tables do not fit: ").split(". ")[0]
    return text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]}..."


def as_json(result: DryRun) -> dict[str, Any]:
    """Return a dry run as plain values: bytes, milliseconds."""
    job = result.job
    return {
        "fits": result.fits,
        "why_not": result.misfit or None,
        "num_nodes": job.num_nodes,
        "ranks_per_node": job.ranks_on_node,
        "device": job.device.type,
        "memory_bytes_per_rank": job.memory_bytes,
        "batch_size_per_rank": result.batch_size,
        "num_tables": result.num_tables,
        "table_bytes": result.table_bytes,
        "ranks": None if result.plan is None else _ranks_as_json(result.plan),
        **_host_needs(result).as_json(),
        "largest_batch": _edge_as_json(result.largest_batch),
        "min_nodes": _edge_as_json(result.min_nodes),
        "planning_seconds": round(result.seconds, 3),
        "planned_with": list(map(list, result.origins)),
        "assumed": result.assumed,
    }


def _ranks_as_json(plan: ShardingPlan) -> dict[str, Any]:
    """Return what each rank does, as lists by rank."""
    memory = plan.memory
    traffic = plan.traffic
    cost = plan.cost
    columns: dict[str, Any] = {
        "memory_bytes": memory.tables.tolist(),
        "memory_bytes_by_part": {
            part: _rounded(part_bytes) for part, part_bytes in plan.memory_parts().items()
        },
        "dense_bytes": plan.dense_bytes,
        "usable_bytes": memory.usable.tolist(),
        "host_bytes_at_start": {
            "configure_model": plan.start_bytes(full=False).tolist(),
            "__init__": plan.start_bytes(full=True).tolist(),
        },
        "host_memory_bytes": None if plan.host_memory is None else plan.host_memory.tables.tolist(),
        "sent_within_node_bytes": _rounded(traffic.within_node()),
        "sent_across_nodes_bytes": _rounded(traffic.across_nodes()),
        "sent_bytes_by_kind": {kind: _rounded(traffic.sent(kind)) for kind in TRAFFIC_KINDS},
    }
    if cost.known:
        # To a nanosecond: what is below is noise of floating point.
        columns["milliseconds"] = cost.milliseconds_by_rank.round(6).tolist()
        milliseconds = cost.milliseconds.round(6)
        columns["milliseconds_by_part"] = dict(
            zip(TIME_PARTS, milliseconds.T.tolist(), strict=True)
        )
    return columns


def _rounded(values: Vector) -> list[int]:
    rounded: list[int] = np.rint(values).astype(np.int64).tolist()
    return rounded


def _edge_as_json(edge: Edge | None) -> dict[str, Any] | None:
    if edge is None:
        return None
    return {
        "fits": edge.possible,
        "does_not_fit": edge.impossible,
        "why_not": edge.reason or None,
        "plans_tried": edge.tries,
        "ended_early": edge.stopped or None,
    }
