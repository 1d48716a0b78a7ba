"""Pictures of a plan: what ranks hold, how long they take, what they send, and the largest tables.

Up to MAX_BARS ranks each have a bar; of more ranks a curve is drawn, sorted by height.
"""

import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.report_text import (
    matrix_in_words,
    memory_in_words,
    sent_in_words,
    time_in_words,
)
from lightning_distrec.sharding.planning.sharding_plan import TIME_PARTS, RankUsage, ShardingPlan
from lightning_distrec.sharding.planning.traffic import TRAFFIC_KINDS
from lightning_distrec.sharding.sharders import SHARDING_TYPES
from lightning_distrec.units import format_bytes, quantity

MAX_BARS = 64
MAX_TABLES = 20
MAX_NUMBERS = 8
"""Matrices up to this many rows have their numbers written in."""
MAX_LETTERS = 34
"""Characters of a table's name next to its bar."""
MIN_SHARE = 0.02
"""Where tables fill less than this of a memory, the picture shows them without the rest of it."""
FAR_APART = 30
"""Colours are logarithmic where the largest entry of a matrix exceeds this multiple of the
median."""
DOTS_PER_INCH = 110

TEXT, FAINT, LIMIT, FREE, RESERVED = "#1c2024", "#9aa0a6", "#c0392b", "#e9edf1", "#b9bfc6"
COLOURS = ("#2f6fb2", "#e08a1e", "#3ba392", "#b4589a", "#6d7885", "#a3b93a", "#8c564b")
"""Of stacked parts, from the bottom, and of sharding types."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_plan(plan: ShardingPlan) -> dict[str, bytes]:
    """Return name of a picture -> the picture, as PNG, in the order in which they are read. Needs
    matplotlib."""
    num_ranks, num_nodes = plan.layout.num_ranks, plan.layout.num_nodes
    draws: dict[str, tuple[Callable[[ShardingPlan], Any], bool]] = {
        "memory": (_draw_memory, True),
        "time": (_draw_time, plan.cost.known),
        "traffic": (_draw_sent, num_ranks > 1),
        "traffic_matrix": (_draw_matrix, 1 < num_ranks <= MAX_BARS or num_nodes > 1),
        "tables": (_draw_tables, True),
    }
    pictures = {}
    for name, (draw, has_content) in draws.items():
        if has_content:
            file = io.BytesIO()
            draw(plan).savefig(file, format="png", dpi=DOTS_PER_INCH, facecolor="white")
            pictures[name] = file.getvalue()
    return pictures


def _draw_memory(plan: ShardingPlan) -> Any:
    kinds = [("GPU" if plan.on_gpu else "host", plan.memory, plan.dense_bytes)]
    if plan.host_memory is not None:
        kinds.append(("host", plan.host_memory, 0))
    figure = _figure(9.5, 3.3 * len(kinds))
    for number, (axes, kind) in enumerate(
        zip(np.atleast_1d(figure.subplots(len(kinds), 1)), kinds, strict=True)
    ):
        _memory(axes, plan.memory_parts(on_host=number > 0), *kind)
    return figure


def _memory(
    axes: Any, parts: dict[str, NDArray[Any]], memory_kind: str, memory: RankUsage, dense_bytes: int
) -> None:
    # Tables that take 1 % of a memory would be an invisible line in a picture of all of it.
    little = int(memory.tables.max()) < MIN_SHARE * int(memory.usable.max())
    reserved = memory.capacity - memory.usable
    dense = np.full_like(reserved, dense_bytes)
    stacked = [(part, part_bytes, COLOURS[i]) for i, (part, part_bytes) in enumerate(parts.items())]
    if not little:
        stacked.append(("free", np.maximum(memory.usable - memory.tables, 0), FREE))
    if dense_bytes and (not little or dense_bytes < MIN_SHARE * int(memory.usable.max())):
        stacked.append(("layers without tables", dense, COLOURS[4]))
        # Layers without tables use what is reserved, and are drawn as a part of it.
        reserved = np.maximum(reserved - dense, 0)
    if not little and reserved.any():
        stacked.append(("reserved", reserved, RESERVED))
    scale, unit = _scale(float(sum(part for _, part, _ in stacked).max()))  # type: ignore[union-attr]
    _stack(
        axes,
        [(name, part / scale, colour) for name, part, colour in stacked],
        total=memory.tables / scale,
    )
    if little:  # full bars would look like full memory
        axes.set_ylim(0, 2 * axes.get_ylim()[1])
        label = f"not to scale: {format_bytes(memory.usable.min())} are usable"
        axes.text(0.01, 0.94, label, transform=axes.transAxes, va="top", size=9, color=LIMIT)
    else:
        usable = float(memory.usable.min()) / scale
        axes.axhline(
            usable, color=LIMIT, linewidth=1.2, linestyle=(0, (4, 3)), label="usable for tables"
        )
    axes.set_ylabel(f"{unit} of {memory_kind} memory", color=TEXT)
    _title(axes, memory_in_words(memory, memory_kind))
    _legend(axes)


def _draw_time(plan: ShardingPlan) -> Any:
    rank_times, part_times = plan.cost.milliseconds_by_rank, plan.cost.milliseconds
    parts = [
        (part, part_times[:, i], COLOURS[i])
        for i, part in enumerate(TIME_PARTS)
        if part_times[:, i].any()
    ]
    return _draw_stack(parts, rank_times, "estimated ms per step", time_in_words(plan))


def _draw_sent(plan: ShardingPlan) -> Any:
    total = plan.traffic.sent()
    scale, unit = _scale(float(total.max()))
    kinds = [
        (kind, plan.traffic.sent(kind) / scale, COLOURS[i]) for i, kind in enumerate(TRAFFIC_KINDS)
    ]
    parts = [part for part in kinds if part[1].any()]
    return _draw_stack(parts, total / scale, f"estimated {unit} sent per step", sent_in_words(plan))


def _draw_stack(
    parts: Sequence[tuple[str, Any, str]], total: NDArray[Any], unit: str, title: str
) -> Any:
    figure = _figure(9.5, 3.5)
    axes = figure.subplots()
    _stack(axes, parts, total=total)
    if len(total) > 1:
        axes.axhline(
            total.mean(), color=TEXT, linewidth=1, linestyle=(0, (4, 3)), label="average of ranks"
        )
    axes.set_ylabel(unit, color=TEXT)
    _title(axes, title)
    _legend(axes)
    return figure


def _draw_matrix(plan: ShardingPlan) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    has_nodes = plan.layout.num_nodes > 1
    matrix = plan.traffic.between_nodes() if has_nodes else plan.traffic.matrix()
    kind, diagonal = "node" if has_nodes else "rank", matrix.diagonal().copy()
    title = matrix_in_words(matrix, kind)
    scale, unit = _scale(float((matrix - np.diag(diagonal)).max()))
    shown = matrix / scale
    # What stays on a rank is not sent: nan leaves these cells in the background's colour, out of
    # the scale.
    np.fill_diagonal(shown, np.nan)
    sizes = shown[np.isfinite(shown) & (shown > 0)]
    apart = sizes.size > 0 and float(sizes.max()) > FAR_APART * float(np.median(sizes))
    norm = (
        LogNorm(float(sizes.min()), float(sizes.max()))
        if apart
        else Normalize(0, max(sizes.max(initial=0), 1e-9))
    )
    side = min(6.0, 3.4 + 0.3 * len(matrix))
    figure = _figure(side + 1.6, side)
    axes = figure.subplots()
    axes.set_facecolor(FREE)
    bar = figure.colorbar(
        axes.imshow(shown, cmap="YlGnBu", norm=norm, interpolation="nearest"), ax=axes, shrink=0.85
    )
    bar.set_label(f"estimated {unit} per step{', logarithmic' if apart else ''}", color=TEXT)
    if apart:  # powers of ten read badly next to a unit
        bar.ax.yaxis.set_major_formatter("{x:,.4g}")
        bar.ax.yaxis.set_minor_formatter("{x:,.4g}")
    bar.ax.tick_params(which="both", colors=TEXT, labelsize=9)
    bar.outline.set_visible(False)
    if len(matrix) <= MAX_NUMBERS:
        for (row, column), number in np.ndenumerate(shown):
            if row != column:
                colour = "white" if norm(number) > 0.5 else TEXT
                axes.text(
                    column, row, f"{number:.3g}", ha="center", va="center", color=colour, size=9
                )
    _rank_ticks(axes.xaxis, len(matrix))
    _rank_ticks(axes.yaxis, len(matrix))
    stays = (
        f"\n(and {format_bytes(float(diagonal.mean()))} stays on a node on average)"
        if has_nodes
        else ""
    )
    axes.set_xlabel(f"to {kind}{stays}", color=TEXT)
    axes.set_ylabel(f"from {kind}", color=TEXT)
    axes.tick_params(colors=TEXT, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.suptitle(title, x=0.02, ha="left", size=11.5, color=TEXT)
    return figure


def _draw_tables(plan: ShardingPlan) -> Any:
    largest = sorted(plan.tables.values(), key=lambda table: -table.num_bytes)[:MAX_TABLES]
    shown, total = (
        sum(table.num_bytes for table in some) for some in (largest, plan.tables.values())
    )
    scale, unit = _scale(largest[0].num_bytes)
    figure = _figure(9.5, 1.2 + 0.29 * len(largest))
    axes = figure.subplots()
    types = [
        kind for kind in SHARDING_TYPES if any(table.sharding_type == kind for table in largest)
    ]
    for kind in types:
        bars = [
            (row, table.num_bytes / scale)
            for row, table in enumerate(largest)
            if table.sharding_type == kind
        ]
        rows, sizes = zip(*bars, strict=True)
        axes.barh(rows, sizes, 0.74, color=COLOURS[SHARDING_TYPES.index(kind)], label=kind)
    for row, table in enumerate(largest):
        text = f"  {format_bytes(table.num_bytes)}, {quantity(len(np.unique(table.ranks)), 'rank')}"
        axes.text(table.num_bytes / scale, row, text, va="center", size=8.5, color=TEXT)
    axes.set_yticks(range(len(largest)), [_short(table.name) for table in largest])
    # From high to low, which puts the largest table on top.
    axes.set_ylim(len(largest) - 0.4, -0.6)
    # A quarter more than the longest bar, for the text next to it.
    axes.set_xlim(0, 1.25 * largest[0].num_bytes / scale)
    axes.set_xlabel(f"{unit} of rows", color=TEXT)
    _style(axes)
    title = f"{quantity(len(largest), 'table')}: {format_bytes(total)} of rows"
    if len(largest) < len(plan.tables):
        title = (
            f"The {len(largest)} largest of {len(plan.tables):,} tables have "
            f"{shown / total:.0%} of all rows' bytes"
        )
    _title(axes, title)
    _legend(axes, top_first=False)
    return figure


def _figure(width: float, height: float) -> Any:
    # Imported here, because matplotlib is optional. A Figure without pyplot needs no display, and
    # goes with its last reference.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def _stack(axes: Any, parts: Sequence[tuple[str, NDArray[Any], str]], total: NDArray[Any]) -> None:
    """Draw parts on top of each other: a bar for each rank, or areas over many ranks in the order
    of `total`."""
    num_ranks = len(total)
    bottom = np.zeros(num_ranks)
    if num_ranks <= MAX_BARS:
        for name, values, colour in parts:
            axes.bar(np.arange(num_ranks), values, 0.8, bottom=bottom, color=colour, label=name)
            bottom = bottom + values
        # The bar of a single rank would fill the picture.
        lone = 0.6 if num_ranks == 1 else 0.0
        axes.set_xlim(-0.6 - lone, num_ranks - 0.4 + lone)
        _rank_ticks(axes.xaxis, num_ranks)
        axes.set_xlabel("rank", color=TEXT)
    else:
        # Neighbours with unlike parts would give a jagged picture, so that they are averaged.
        order = np.array_split(np.argsort(-total, kind="stable"), MAX_BARS)
        ends = np.concatenate([[0], np.cumsum([len(some) for some in order])])
        bottom = np.zeros(len(order))
        for name, values, colour in parts:
            top = bottom + np.array([values[some].mean() for some in order])
            low, high = np.append(bottom, bottom[-1]), np.append(top, top[-1])
            axes.fill_between(ends, low, high, step="post", color=colour, label=name, linewidth=0)
            bottom = top
        # The line shows each rank's own total: averages of neighbours would hide a single slow
        # rank.
        falling = np.append(np.sort(total)[::-1], total.min())
        axes.step(np.arange(num_ranks + 1), falling, where="post", color=TEXT, linewidth=1)
        bottom = np.append(bottom, total.max())
        axes.set_xlim(0, num_ranks)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"all {num_ranks:,} ranks, sorted", color=TEXT)
    axes.set_ylim(0, 1.05 * max(float(bottom.max()), 1e-9))
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
    _style(axes)


def _rank_ticks(axis: Any, number: int) -> None:
    from matplotlib.ticker import MaxNLocator

    if number <= 16:
        axis.set_ticks(range(number))
    else:
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True))


def _style(axes: Any) -> None:
    axes.tick_params(colors=TEXT, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(FAINT)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", size=11.5, color=TEXT, pad=10)


def _legend(axes: Any, top_first: bool = True) -> None:
    """Write the names next to the picture, in the order in which parts are stacked."""
    handles, labels = axes.get_legend_handles_labels()
    order = -1 if top_first else 1
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(
        handles[::order], labels[::order], **place, frameon=False, fontsize=9, labelcolor=TEXT
    )


def _scale(largest: float) -> tuple[float, str]:
    """Return the bytes of a unit in which `largest` is a number that reads well, and its name."""
    scale, units = 1.0, ["B", "KiB", "MiB", "GiB", "TiB"]
    # From 1023.5 on a number would be printed as 1,024 of the smaller unit.
    while largest / scale >= 1023.5 and len(units) > 1:
        scale *= 1024
        units.pop(0)
    return scale, units[0]


def _short(name: str) -> str:
    """Return the end of a name, by which tables differ, so that it fits next to the picture."""
    name = name if len(name) <= MAX_LETTERS else f"...{name[3 - MAX_LETTERS :]}"
    return name.replace("$", r"\$")  # a dollar begins a formula to matplotlib
