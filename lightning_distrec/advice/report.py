"""An advice for people, as a table of one screen, and for programs, as JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.advice.advise import FULL_SHARE, Advice
from lightning_distrec.strategies.estimates.estimate import Estimate
from lightning_distrec.units import format_bytes, quantity

PARTS = ("parameters", "gradients", "optimizer state", "gathered", "activations")


def print_advice(advice: Advice, console: Console) -> None:
    """Print what each strategy needs, what was assumed, and which one to take."""
    job = advice.job
    ranks = f"{quantity(job.num_ranks, 'rank')} on {quantity(job.num_nodes, 'node')}"
    text = TextTable(
        title=f"{ranks}, {format_bytes(job.memory_bytes)} each, precision {job.precision}: memory of a rank",
        title_justify="left",
        caption="Reckoned, not measured: " + "; ".join(advice.said) + "." if advice.said else None,
        caption_justify="left",
    )
    for heading in ("strategy", *PARTS, "in all", "", "sent per step"):
        text.add_column(heading, justify="left" if heading in ("strategy", "") else "right")
    for row in advice.rows:
        name = f"> {row.strategy}" if row.strategy == advice.chosen else f"  {row.strategy}"
        if row.refused:
            text.add_row(name, *([""] * (len(PARTS) + 1)), "refused", "")
            continue
        parts = [format_bytes(row.memory[part]) if part in row.memory else "-" for part in PARTS]
        sent = "-" if row.sent_total is None else format_bytes(row.sent_total)
        text.add_row(name, *parts, format_bytes(row.total), _fit(advice, row), sent)
    console.print(text)
    for row in advice.rows:
        if row.refused:
            console.print(f"{row.strategy} refuses it: {row.refused}")
    console.print(f"strategy: {advice.chosen}, because {advice.reason}.")


def _fit(advice: Advice, row: Estimate) -> str:
    if row.total > advice.job.memory_bytes:
        return "DOES NOT FIT"
    return "fits" if advice.fits(row) else f"tight, above {FULL_SHARE:.0%}"


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
                "strategy": row.strategy,
                "refused": row.refused or None,
                "memory_bytes": {part: round(number) for part, number in row.memory.items()},
                "total_bytes": round(row.total),
                "fits": advice.fits(row),
                "sent_bytes_per_step": row.sent and {what: round(number) for what, number in row.sent.items()},
            }
            for row in advice.rows
        ],
        "assumed": advice.said,
    }
