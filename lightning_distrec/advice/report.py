"""Prints advice as a table, and returns it as JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.advice.advise import MAX_MEMORY_SHARE, Advice
from lightning_distrec.strategies.estimates.estimate import Estimate
from lightning_distrec.units import format_bytes, quantity

MEMORY_COLUMNS = ("parameters", "gradients", "optimizer state", "gathered", "exchange", "activations", "recomputed")


def print_advice(advice: Advice, console: Console) -> None:
    """Print what each strategy needs, what was assumed, and which strategy to take."""
    job = advice.job
    ranks = f"{quantity(job.num_ranks, 'rank')} on {quantity(job.num_nodes, 'node')}"
    text = TextTable(
        title=f"{ranks}, {format_bytes(job.memory_bytes)} each, precision {job.precision}: memory per rank",
        title_justify="left",
        caption="Estimated, not measured: " + "; ".join(advice.notes) + "." if advice.notes else None,
        caption_justify="left",
    )
    uses = [use for use in MEMORY_COLUMNS if use != "recomputed" or any(use in e.memory for e in advice.estimates)]
    for heading in ("strategy", *uses, "total", "", "sent per step"):
        text.add_column(heading, justify="left" if heading in ("strategy", "") else "right")
    for estimate in advice.estimates:
        name = f"> {estimate.strategy}" if estimate.strategy == advice.chosen else f"  {estimate.strategy}"
        if estimate.refused:
            text.add_row(name, *([""] * (len(uses) + 1)), "refused", "")
            continue
        memory = [format_bytes(estimate.memory[use]) if use in estimate.memory else "-" for use in uses]
        sent = "-" if estimate.sent_total is None else format_bytes(estimate.sent_total)
        text.add_row(name, *memory, format_bytes(estimate.total), _fit(advice, estimate), sent)
    console.print(text)
    for estimate in advice.estimates:
        if estimate.refused:
            console.print(f"{estimate.strategy} refuses the module: {estimate.refused}")
    console.print(f"strategy: {advice.chosen}, because {advice.reason}.")


def _fit(advice: Advice, estimate: Estimate) -> str:
    if estimate.total > advice.job.memory_bytes:
        return "DOES NOT FIT"
    return "fits" if advice.fits(estimate) else f"tight, above {MAX_MEMORY_SHARE:.0%}"


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all of an advice as plain values."""
    job = advice.job
    return {
        "strategy": advice.chosen,
        "reason": advice.reason,
        "num_ranks": job.num_ranks,
        "num_nodes": job.num_nodes,
        "memory_bytes_per_rank": job.memory_bytes,
        "precision": job.precision,
        "strategies": [
            {
                "strategy": estimate.strategy,
                "refused": estimate.refused or None,
                "memory_bytes": {use: round(number) for use, number in estimate.memory.items()},
                "total_bytes": round(estimate.total),
                "fits": advice.fits(estimate),
                "sent_bytes_per_step": estimate.sent
                and {kind: round(number) for kind, number in estimate.sent.items()},
                "idle_share": estimate.idle and round(estimate.idle, 4),
            }
            for estimate in advice.estimates
        ],
        "assumed": advice.notes,
    }
