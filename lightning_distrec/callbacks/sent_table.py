"""Prints what ranks have sent in a fit, by kind."""

from rich.console import Console
from rich.table import Table as TextTable
from torch import Tensor

from lightning_distrec.callbacks.sent_bytes import DENSE_GRADIENTS, KINDS, RARE_KINDS
from lightning_distrec.units import format_bytes


def print_table(per_step: Tensor, ranks_on_node: int | None, steps: int, console: Console | None = None) -> None:
    """Print the table. per_step: shape (ranks, 4, kinds), bytes sent, those across nodes, calls, and their seconds."""
    ranks = len(per_step)
    several_nodes = ranks_on_node is not None and ranks_on_node < ranks
    text = TextTable(
        title=f"Bytes sent per rank and step ({ranks} ranks, {steps} steps)",
        title_justify="left",
        caption="All-to-alls and sends are counted exactly, other collectives as rings; gradients under DDP are "
        "computed.",
        caption_justify="left",
    )
    of_nodes = ["across nodes"] if several_nodes else []
    headings = ["kind", "mean", "max", "on rank", *of_nodes, "source", "calls", "ms", "MB/s"]
    for heading in headings:
        text.add_column(heading, justify="left" if heading in ("kind", "source") else "right")
    sent, across, calls, seconds = per_step.unbind(1)
    # DDP's own reduction makes no call that is seen; those of hooks and of replicas of stages are.
    is_computed = [kind == DENSE_GRADIENTS and not calls[:, i].any() for i, kind in enumerate(KINDS)]
    sources = ["computed" if of_kind else "counted" for of_kind in is_computed]
    times = [_times(*(float(numbers[:, i].mean()) for numbers in (sent, calls, seconds))) for i in range(len(KINDS))]
    columns = [(kind, sent[:, i], across[:, i], sources[i], times[i]) for i, kind in enumerate(KINDS)]
    for kind, by_rank, away, source, of_time in [*columns, ("total", sent.sum(1), across.sum(1), "", ("", "", ""))]:
        if kind in RARE_KINDS and not by_rank.any():
            continue
        text.add_row(
            kind,
            format_bytes(float(by_rank.mean())),
            format_bytes(float(by_rank.max())),
            str(int(by_rank.argmax())) if float(by_rank.max()) > float(by_rank.min()) else "all",
            *([format_bytes(float(away.mean()))] if several_nodes else []),
            source,
            *of_time,
        )
    (console or Console()).print(text)


def _times(sent: float, calls: float, seconds: float) -> tuple[str, str, str]:
    """Return calls, milliseconds and MB/s as texts; empty where they are not known (seconds: nan)."""
    if not calls:
        return "", "", ""
    if seconds > 0:
        return f"{calls:.1f}", f"{1000 * seconds:.2f}", f"{sent / seconds / 1e6:.1f}"
    return f"{calls:.1f}", "", ""
