"""Pictures of a plan: what ranks hold, how long they take, what they send, and the largest tables.

Up to MAX_BARS ranks each have a bar; of more ranks areas are drawn, sorted by height.
"""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.errors import require
from lightning_distrec.sharding.planning.report_text import (
    matrix_in_words,
    memory_in_words,
    sent_in_words,
    time_in_words,
)
from lightning_distrec.sharding.planning.sharding_plan import TIME_PARTS, RankUsage, ShardingPlan
from lightning_distrec.sharding.planning.traffic import TRAFFIC_KINDS
from lightning_distrec.units import format_bytes, quantity

MAX_BARS = 64
MAX_TABLES = 20
MAX_NUMBERS = 8
"""Matrices up to this many rows have their numbers written in."""
MAX_LETTERS = 34
"""Characters of a table's name next to its bar."""
FAR_ABOVE = 4
"""A limit above this multiple of the tallest bar is not drawn: bars would be too small to read."""
DOTS_PER_INCH = 110
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Parts = Mapping[str, NDArray[Any]]
"""Name of a part -> (R,) numbers."""


def draw_plan(plan: ShardingPlan) -> dict[str, bytes]:
    """Return name of a picture -> the picture, as PNG, in the order in which they are read.

    Raises MissingPackageError: matplotlib is not installed.
    """
    require("matplotlib", "a picture of a plan")
    num_ranks = plan.layout.num_ranks
    figures = {"memory": _draw_memory(plan)}
    if plan.cost.known:
        figures["time"] = _draw_time(plan)
    if num_ranks > 1:
        figures["traffic"] = _draw_sent(plan)
    if 1 < num_ranks <= MAX_BARS or plan.layout.num_nodes > 1:
        figures["traffic_matrix"] = _draw_matrix(plan)
    figures["tables"] = _draw_tables(plan)
    pictures = {}
    for name, figure in figures.items():
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
        pictures[name] = file.getvalue()
    return pictures


def _draw_memory(plan: ShardingPlan) -> Any:
    on_both = plan.host_memory is not None
    figure = _figure(9.5, 6.6 if on_both else 3.3)
    all_axes = figure.subplots(2 if on_both else 1, 1, squeeze=False)[:, 0]
    _stack_memory(all_axes[0], plan.memory_parts(), "GPU" if plan.on_gpu else "host", plan.memory)
    if plan.host_memory is not None:
        _stack_memory(all_axes[1], plan.memory_parts(on_host=True), "host", plan.host_memory)
    return figure


def _stack_memory(axes: Any, parts: Parts, memory_kind: str, memory: RankUsage) -> None:
    scale, unit = _scale(float(memory.tables.max()))
    usable = float(memory.usable.min()) / scale
    tallest = float(memory.tables.max()) / scale
    if usable <= FAR_ABOVE * tallest:
        axes.axhline(usable, color="C3", linestyle="--", label="usable for tables")
    _stack(axes, _scaled(parts, scale), memory.tables)
    axes.set_ylabel(f"{unit} of {memory_kind} memory")
    _label(axes, memory_in_words(memory, memory_kind))


def _draw_time(plan: ShardingPlan) -> Any:
    parts = dict(zip(TIME_PARTS, plan.cost.milliseconds.T, strict=True))
    total = plan.cost.milliseconds_by_rank
    return _draw_stack(parts, total, "estimated ms per step", time_in_words(plan))


def _draw_sent(plan: ShardingPlan) -> Any:
    total = plan.traffic.sent()
    scale, unit = _scale(float(total.max()))
    parts = _scaled({kind: plan.traffic.sent(kind) for kind in TRAFFIC_KINDS}, scale)
    label = f"estimated {unit} sent per step"
    return _draw_stack(parts, total / scale, label, sent_in_words(plan))


def _scaled(parts: Parts, scale: float) -> Parts:
    return {name: values / scale for name, values in parts.items()}


def _draw_stack(parts: Parts, total: NDArray[Any], unit: str, title: str) -> Any:
    figure = _figure(9.5, 3.5)
    axes = figure.subplots()
    _stack(axes, parts, total)
    axes.axhline(total.mean(), color="black", linewidth=1, linestyle="--", label="average of ranks")
    axes.set_ylabel(unit)
    _label(axes, title)
    return figure


def _stack(axes: Any, parts: Parts, total: NDArray[Any]) -> None:
    """Draw parts on top of each other: a bar for each rank, or areas in the order of `total`."""
    num_ranks = len(total)
    parts = {name: values for name, values in parts.items() if values.any()}
    if num_ranks <= MAX_BARS:
        bottom = np.zeros(num_ranks)
        for name, values in parts.items():
            axes.bar(np.arange(num_ranks), values, bottom=bottom, label=name)
            bottom = bottom + values
        _mark_ranks(axes.xaxis)
        axes.set_xlabel("rank")
    elif parts:
        order = np.argsort(-total, kind="stable")
        heights = [values[order] for values in parts.values()]
        axes.stackplot(np.arange(num_ranks), heights, labels=list(parts))
        axes.set_xlabel(f"all {num_ranks:,} ranks, sorted")


def _draw_matrix(plan: ShardingPlan) -> Any:
    has_nodes = plan.layout.num_nodes > 1
    matrix = plan.traffic.between_nodes() if has_nodes else plan.traffic.matrix()
    kind = "node" if has_nodes else "rank"
    stays = float(matrix.diagonal().mean())
    title = matrix_in_words(matrix, kind)
    sent = matrix.astype(float)
    np.fill_diagonal(sent, np.nan)  # what stays is not sent: these cells have no colour
    scale, unit = _scale(float(np.nanmax(sent)))
    figure = _figure(7.6, 6.0)
    axes = figure.subplots()
    image = axes.imshow(sent / scale, cmap="YlGnBu", vmin=0)
    figure.colorbar(image, ax=axes, label=f"estimated {unit} per step")
    if len(matrix) <= MAX_NUMBERS:
        for (row, column), number in np.ndenumerate(sent / scale):
            if row != column:
                axes.text(column, row, f"{number:.3g}", ha="center", va="center")
    _mark_ranks(axes.xaxis)
    _mark_ranks(axes.yaxis)
    note = f"\n(and {format_bytes(stays)} stays on a node on average)" if has_nodes else ""
    axes.set_xlabel(f"to {kind}{note}")
    axes.set_ylabel(f"from {kind}")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_tables(plan: ShardingPlan) -> Any:
    ordered = sorted(plan.tables.values(), key=lambda table: -table.num_bytes)
    largest = ordered[:MAX_TABLES]
    scale, unit = _scale(largest[0].num_bytes)
    figure = _figure(9.5, 1.2 + 0.29 * len(largest))
    axes = figure.subplots()
    kinds = sorted({table.sharding_type for table in largest})
    labels = dict(zip(kinds, kinds, strict=True))
    for row, table in enumerate(largest):
        width = table.num_bytes / scale
        kind = table.sharding_type
        color = f"C{kinds.index(kind)}"
        axes.barh(row, width, color=color, label=labels.pop(kind, ""))  # each once in the legend
        ranks = quantity(len(np.unique(table.ranks)), "rank")
        text = f"  {format_bytes(table.num_bytes)}, {ranks}"
        axes.text(width, row, text, va="center", fontsize="small")
    axes.set_yticks(range(len(largest)), [_short(table.name) for table in largest])
    axes.invert_yaxis()  # the largest on top
    axes.margins(x=0.25)  # for the text next to the longest bar
    axes.set_xlabel(f"{unit} of rows")
    total = sum(table.num_bytes for table in ordered)
    title = f"{quantity(len(largest), 'table')}: {format_bytes(total)} of rows"
    if len(largest) < len(ordered):
        share = sum(table.num_bytes for table in largest) / total
        title = f"The {len(largest)} largest of {len(ordered):,} tables have {share:.0%} of all "
        title += "rows' bytes"
    _label(axes, title)
    return figure


def _figure(width: float, height: float) -> Any:
    # Imported here, because matplotlib is optional. A Figure without pyplot needs no display, and
    # goes with its last reference.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _mark_ranks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=16, integer=True))


def _label(axes: Any, title: str) -> None:
    """Write the title above, and the names of parts next to the picture, the topmost first."""
    axes.set_title(title, loc="left", fontsize="medium", wrap=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True)


def _scale(largest: float) -> tuple[float, str]:
    """Return the bytes of a unit in which `largest` is a number that reads well, and its name."""
    power = 0
    # From 1023.5 on a number would be printed as 1,024 of the smaller unit.
    while largest / 1024**power >= 1023.5 and power < len(UNITS) - 1:
        power += 1
    return float(1024**power), UNITS[power]


def _short(name: str) -> str:
    """Return the end of a name, by which tables differ, so that it fits next to the picture."""
    name = name if len(name) <= MAX_LETTERS else f"...{name[3 - MAX_LETTERS :]}"
    return name.replace("$", r"\$")  # a dollar begins a formula to matplotlib
