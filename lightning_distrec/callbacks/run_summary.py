"""What a fit came to over all ranks: as numbers for JSON, and as a table."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.callbacks.rank_records import RankRecord, Totals
from lightning_distrec.units import format_bytes, format_ranks


def stragglers(totals: Sequence[Totals], share: float) -> list[int]:
    """Return the places of those whose own time is above the median by more than `share` of a step."""
    own = [total.ms(total.own) for total in totals]
    step = mean(total.ms(total.seconds) for total in totals)
    return [place for place, ms in enumerate(own) if ms - median(own) > share * step]


def numbers_of(records: Sequence[RankRecord]) -> dict[str, float]:
    """Return name -> number for loggers, from the ranks' latest records."""
    latest = [record.latest for record in records]
    own = [total.ms(total.own) for total in latest]
    series = {
        "step_ms": [total.ms(total.seconds) for total in latest],
        "own_ms": own,
        "wait_ms": [total.ms(total.waited) for total in latest],
        "host_cpu_ms": [total.ms(total.cpu_seconds) for total in latest],
    }
    series |= {f"{name}_bytes": [float(record.memory[name]) for record in records] for name in records[0].memory}
    numbers = {f"ranks/{name}_max": max(values) for name, values in series.items()}
    numbers |= {f"ranks/{name}_mean": mean(values) for name, values in series.items()}
    return numbers | {"ranks/slowest_rank": float(records[own.index(max(own))].rank)}


def summary_of(
    records: Sequence[RankRecord], missing: Sequence[int], share: float, sent: dict[str, float]
) -> dict[str, Any]:
    """Return the summary as plain values. sent: bytes per step by kind, the mean of all ranks; empty if not counted."""
    fits = [record.fit for record in records]
    seconds = max(fit.seconds for fit in fits)
    own = [fit.ms(fit.own) for fit in fits]
    spans = dict.fromkeys(name for fit in fits for name in fit.seconds_by_span)
    where = {name: mean(fit.ms(fit.seconds_by_span.get(name, 0.0)) for fit in fits) for name in spans}
    step = mean(fit.ms(fit.seconds) for fit in fits)
    return {
        "ranks": len(records) + len(missing),
        "ranks_without_record": list(missing),
        "steps": max(fit.steps for fit in fits),
        "samples_per_second": sum(fit.samples for fit in fits) / seconds if seconds else 0.0,
        "step_ms": step,
        "ms_per_step": {**where, "other": step - sum(where.values())} if where else {},
        "slowest_rank": records[own.index(max(own))].rank,
        "stragglers": [records[place].rank for place in stragglers(fits, share)],
        "bytes_sent_per_step": sent,
        "by_rank": [
            {
                "rank": record.rank,
                "host": record.host,
                "steps": fit.steps,
                "samples": fit.samples,
                "step_ms": fit.ms(fit.seconds),
                "own_ms": fit.ms(fit.own),
                "wait_ms": fit.ms(fit.waited),
                "host_cpu_ms": fit.ms(fit.cpu_seconds),
                "memory_bytes": record.memory,
            }
            for record, fit in zip(records, fits, strict=True)
        ],
    }


def print_summary(summary: dict[str, Any], max_ranks: int = 16, console: Console | None = None) -> None:
    """Print the summary; of more than `max_ranks` ranks, those with the largest own time."""
    where = ", ".join(f"{name} {ms:.1f}" for name, ms in summary["ms_per_step"].items())
    sent = sum(summary["bytes_sent_per_step"].values())
    lines = [
        f"{summary['samples_per_second']:,.0f} samples/s, {summary['step_ms']:.1f} ms per step",
        *([f"ms per step, mean of ranks: {where}"] if where else []),
        *([f"{format_bytes(sent)} sent per rank and step"] if sent else []),
        f"most time of its own: rank {summary['slowest_rank']}"
        + (f"; stragglers: rank {format_ranks(summary['stragglers'])}" if summary["stragglers"] else ""),
        *([f"no record of rank {format_ranks(missing)}"] if (missing := summary["ranks_without_record"]) else []),
    ]
    rows = summary["by_rank"]
    if len(rows) > max_ranks:
        rows = sorted(rows, key=lambda row: -row["own_ms"])[:max_ranks]
        lines.append(f"{max_ranks} of {summary['ranks']} ranks are shown, those with most time of their own")
    text = TextTable(
        title=f"Fit over {summary['ranks']} ranks" if summary["ranks"] > 1 else "Fit",
        title_justify="left",
        caption="\n".join(lines),
        caption_justify="left",
    )
    for heading in ("rank", "host", "step ms", "own ms", "wait ms", "cpu ms", *rows[0]["memory_bytes"]):
        text.add_column(heading.replace("_", " "), justify="left" if heading == "host" else "right")
    for row in rows:
        times = (f"{row[name]:.1f}" for name in ("step_ms", "own_ms", "wait_ms", "host_cpu_ms"))
        text.add_row(str(row["rank"]), row["host"], *times, *map(format_bytes, row["memory_bytes"].values()))
    (console or Console()).print(text)
