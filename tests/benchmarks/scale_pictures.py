"""Pictures of docs/scale.md. Lines are reckoned; what was measured is a dot."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.scale_checkpoints import Checkpoints
from tests.benchmarks.scale_formulas import FORMULAS, Grouped, Numbers
from tests.benchmarks.scale_points import Point, Points

DOTS_PER_INCH = 110
TEXT, FAINT = "#1c2024", "#9aa0a6"
COLOURS = ("#2f6fb2", "#e08a1e", "#3ba392", "#b4589a", "#6d7885", "#a3b93a")
MEBI, GIGA = 2**20, 1e9
GROUP_RANKS = tuple(512 * 2**power for power in range(6))
CUT_RANKS = tuple(2**power for power in range(3, 13))
MESSAGES = (1e-6, 5e-6, 20e-6)
TEN_TERA_RANKS = 256
"""So many ranks at least have room for 10 TB."""


def draw(points: Points, checkpoints: Checkpoints, folder: Path) -> list[Path]:
    """Write all pictures; returns their paths."""
    pictures: dict[str, Callable[[], Any]] = {
        "scale_memory": lambda: _memory(points),
        "scale_bytes": lambda: _bytes(points),
        "scale_time": lambda: _time(points),
        "scale_cuts": _cuts,
        "scale_tables_rows": lambda: _tables_and_rows(points),
        "scale_planning": lambda: _planning(points),
        "scale_groups": _groups,
        "scale_checkpoints": lambda: _checkpoints(points, checkpoints),
    }
    paths = []
    for name, picture in pictures.items():
        paths.append(folder / f"{name}.png")
        picture().savefig(paths[-1], dpi=DOTS_PER_INCH, facecolor="white")
    return paths


def _memory(points: Points) -> Any:
    figure, (axes,) = _figure(1)
    ranks = _of(points.ranks, lambda p: p.job.num_ranks)
    _line(
        axes,
        ranks,
        _of(points.ranks, lambda p: p.planned.facts["device_bytes_max"] / GIGA),
        "fullest rank",
        0,
    )
    _line(
        axes,
        ranks,
        _of(points.ranks, lambda p: p.planned.facts["device_bytes_mean"] / GIGA),
        "mean of ranks",
        1,
    )
    equal = _of(points.ranks, lambda p: p.planned.facts["row_bytes"] / p.job.num_ranks / GIGA)
    _line(axes, ranks, equal, "all rows / ranks", 4, dashed=True)
    _ranks_axis(axes, ranks)
    _finish(
        axes, "GB of a rank's GPU", "Rows are shared out among ranks, buffers are not", log=True
    )
    return figure


def _bytes(points: Points) -> Any:
    figure, (remaining, right) = _figure(2)
    ranks = _of(points.ranks, lambda p: p.job.num_ranks)
    for number, (name, kind) in enumerate((
        ("ids and lengths", "ids"),
        ("rows", "rows"),
        ("row gradients", "row gradients"),
    )):
        sent = _of(points.ranks, lambda p, kind=kind: _sent(p, kind) / MEBI)
        _line(remaining, ranks, sent, name, number, dashed=number == 2)
    _line(
        right,
        ranks,
        _of(points.ranks, lambda p: sum(p.planned.facts["within"].values()) / MEBI),
        "on the node",
        2,
    )
    across = _of(points.ranks, lambda p: sum(p.planned.facts["across"].values()) / MEBI)
    _line(right, ranks, across, "to other nodes", 3)
    for axes in (remaining, right):
        _ranks_axis(axes, ranks)
    _finish(
        remaining,
        "MiB a rank and step, mean",
        "Rows that a rank sends jump where sharding types change ...",
    )
    _finish(right, "MiB a rank and step, mean", "... on the node; what leaves it levels off")
    return figure


def _time(points: Points) -> Any:
    figure, (remaining, right) = _figure(2)
    ranks = _of(points.ranks, lambda p: p.job.num_ranks)
    _line(remaining, ranks, _of(points.ranks, lambda p: p.planned.critical_path), "slowest rank", 0)
    _line(
        remaining,
        ranks,
        _of(points.ranks, lambda p: _part(p, "milliseconds_mean", "")),
        "mean of ranks",
        1,
    )
    exchange = _of(points.ranks, lambda p: _part(p, "milliseconds_mean", "exchange"))
    _line(remaining, ranks, exchange, "... of it, exchanges", 2)
    _line(
        remaining,
        ranks,
        _of(points.ranks, lambda p: p.planned.lower_bound or 0),
        "lower bound of any plan",
        4,
        dashed=True,
    )
    cuts = sorted({cut for point in points.ranks for cut in point.planned.facts["sharding_types"]})
    bottom = [0.0] * len(ranks)
    for number, cut in enumerate(cuts):
        share = [
            100 * p.planned.facts["sharding_types"].get(cut, 0) / p.job.num_tables
            for p in points.ranks
        ]
        right.bar(range(len(ranks)), share, 0.8, bottom=bottom, color=COLOURS[number], label=cut)
        bottom = [below + local for below, local in zip(bottom, share, strict=True)]
    right.set_xticks(range(len(ranks)), [_short(number) for number in ranks])
    right.set_xlabel("ranks", color=TEXT)
    _ranks_axis(remaining, ranks)
    _finish(
        remaining,
        "estimated ms a step for tables",
        "The second node costs most, then the heaviest shard",
        log=True,
    )
    _finish(right, "% of the tables", "How the planner shards the same tables", below=True)
    return figure


def _cuts() -> Any:
    figure, (remaining, right) = _figure(2)
    for number, cut in enumerate(FORMULAS):
        numbers = [Numbers(R=ranks, L=8) for ranks in CUT_RANKS]
        _line(remaining, CUT_RANKS, [n.sent(cut) / MEBI for n in numbers], cut, number)
        _line(right, CUT_RANKS[1:], [n.sent_across(cut) / MEBI for n in numbers[1:]], cut, number)
    for axes in (remaining, right):
        _ranks_axis(axes, CUT_RANKS)
    _finish(remaining, "MiB a rank and step", "One table: row_wise grows with ranks", log=True)
    _finish(
        right,
        "MiB a rank and step to other nodes",
        "... and so does what it sends to other nodes",
        log=True,
    )
    return figure


def _tables_and_rows(points: Points) -> Any:
    """Draw time, bytes sent and memory below each other: quantities of unlike units share no
    axis."""
    from matplotlib.ticker import LogLocator

    figure, grid = _figure(2, rows=3)
    place = f"{points.rows[0].job.num_ranks:,} ranks"
    tables = _of(points.tables, lambda p: p.job.num_tables)
    rows = _of(points.rows, lambda p: p.planned.facts["row_bytes"] / 1e12)
    for column, some, along, name in (
        (0, points.tables, tables, "tables"),
        (1, points.rows, rows, "TB of rows"),
    ):
        time, sent, memory = (grid[number][column] for number in range(3))
        _line(time, along, _of(some, lambda p: p.planned.critical_path), "", 0)
        mebibytes = _of(
            some, lambda p: sum(_sent(p, kind) for kind in p.planned.facts["within"]) / MEBI
        )
        _line(sent, along, mebibytes, "", 2)
        _line(
            memory, along, _of(some, lambda p: p.planned.facts["device_bytes_mean"] / GIGA), "", 1
        )
        for axes in (time, sent, memory):
            axes.set_xscale("log")
            axes.set_xticks(
                along, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in along]
            )
            axes.minorticks_off()
        memory.set_xlabel(name, color=TEXT)
        title = (
            f"More tables ({place})"
            if column == 0
            else (f"Rows cost memory, and larger shards ({place})")
        )
        _finish(time, "ms a step, slowest rank", title, log=True)
        _finish(sent, "MiB sent a rank and step", "", log=True)
        _finish(memory, "GB of a rank's GPU, mean", "", log=True)
        for axes in (time, sent, memory):
            low, high = axes.get_ylim()
            # Nine labels a decade print over each other where there is more than one.
            axes.yaxis.set_minor_locator(
                LogLocator(subs=(2, 5) if high > 5 * low else range(2, 10))
            )
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,.10g}")
            axes.tick_params(which="minor", colors=TEXT, labelsize=9)
    return figure


def _planning(points: Points) -> Any:
    figure, (remaining, right) = _figure(2)
    ranks = _of(points.ranks, lambda p: p.job.num_ranks)
    tables = _of(points.tables, lambda p: p.job.num_tables)
    for axes, some, along in ((remaining, points.ranks, ranks), (right, points.tables, tables)):
        _line(
            axes, along, _of(some, lambda p: p.planned.seconds), "seconds (measured)", 0, dots=True
        )
        gibi = _of(some, lambda p: p.planned.peak_bytes / 2**30)
        _line(axes, along, gibi, "GiB of the process (measured)", 1, dots=True)
    _ranks_axis(remaining, ranks)
    right.set_xscale("log")
    right.set_xticks(tables, [f"{number:,}" for number in tables])
    right.minorticks_off()
    right.set_xlabel("tables", color=TEXT)
    _finish(
        remaining,
        "s, GiB",
        f"Planning {points.ranks[0].job.num_tables:,} tables takes under a minute",
        log=True,
    )
    _finish(right, "s, GiB", f"Planning for {points.tables[0].job.num_ranks:,} ranks", log=True)
    return figure


def _groups() -> Any:
    figure, (remaining, right) = _figure(2)
    whole = [Grouped(num_ranks=ranks, group=GROUP_RANKS[0]) for ranks in GROUP_RANKS]
    _line(
        remaining,
        GROUP_RANKS,
        [1e3 * g.exchange_seconds(False) for g in whole],
        "all ranks hold tables once",
        0,
    )
    for number, steps in enumerate((1, 100, 1000), start=1):
        seconds = [g.exchange_seconds(True) + g.average_seconds / steps for g in whole]
        every = "step" if steps == 1 else f"{steps:,} steps"
        _line(
            remaining,
            GROUP_RANKS,
            [1e3 * s for s in seconds],
            f"groups of 512, averaged every {every}",
            number,
        )
    for number, message in enumerate(MESSAGES):
        some = [
            Grouped(num_ranks=ranks, group=GROUP_RANKS[0], message_seconds=message)
            for ranks in GROUP_RANKS[1:]
        ]
        _line(
            right,
            GROUP_RANKS[1:],
            [g.least_steps for g in some],
            f"{1e6 * message:.0f} µs a message",
            number,
        )
    right.axhline(1, color=FAINT, linewidth=1)
    for axes in (remaining, right):
        _ranks_axis(axes, GROUP_RANKS)
    _finish(
        remaining,
        "reckoned ms of exchanges a step",
        "Groups of ranks pay if averages are rare",
        log=True,
    )
    _finish(right, "steps between averages", "... from so many steps apart on", log=True)
    return figure


def _checkpoints(points: Points, measured: Checkpoints) -> Any:
    figure, (remaining, right) = _figure(2)
    ranks = _of(points.ranks, lambda p: p.job.num_ranks)
    enough = [number for number in ranks if number >= TEN_TERA_RANKS]
    row_bytes = points.ranks[0].planned.facts["row_bytes"]
    sets = [
        (f"{row_bytes / GIGA:.0f} GB of rows", row_bytes, ranks),
        ("10 TB of rows", 10e12, enough),
    ]
    for number, (name, num_bytes, along) in enumerate(sets):
        _line(remaining, along, [2 * num_bytes / r / GIGA for r in along], name, number)
        own_part = [2 * num_bytes / r / measured.bytes_per_second_of_rank for r in along]
        _line(right, along, own_part, f"{name}, each rank as fast as here", number, dashed=True)
        shared = [2 * num_bytes / (10 * GIGA)] * len(along)
        right.plot(
            along, shared, ":", color=COLOURS[number], label=f"{name}, 10 GB/s for all ranks"
        )
    right.plot(
        measured.num_ranks,
        measured.seconds,
        "o",
        color=TEXT,
        label=f"measured, {measured.size_in_words}",
    )
    _ranks_axis(remaining, ranks)
    _ranks_axis(right, [measured.num_ranks, *ranks])
    _finish(
        remaining,
        "GB that a rank writes",
        "A rank writes its share of rows, and as much state",
        log=True,
    )
    _finish(right, "seconds to save", "Extrapolated: disks decide how long a save takes", log=True)
    return figure


def _sent(point: Point, kind: str) -> float:
    return float(point.planned.facts["within"][kind] + point.planned.facts["across"][kind])


def _part(point: Point, entry: str, name: str) -> float:
    """Return the milliseconds of all parts whose name ends so."""
    return float(sum(ms for part, ms in point.planned.facts[entry].items() if part.endswith(name)))


def _of(points: Sequence[Point], value: Callable[[Point], float]) -> list[float]:
    return [value(point) for point in points]


def _figure(panels: int, rows: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes: a list of them, or a list for each of several rows."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height = 4.4 if rows == 1 else 2.5 * rows
    figure = Figure(
        figsize=(6.4 * panels, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    grid = figure.subplots(rows, panels, squeeze=False)
    return figure, grid[0] if rows == 1 else grid


def _line(
    axes: Any,
    along: Sequence[float],
    values: Sequence[float],
    name: str,
    colour: int,
    dashed: bool = False,
    dots: bool = False,
) -> None:
    style = (0, (4, 3)) if dashed else "-"
    marker = "o" if dots else None
    axes.plot(
        along,
        values,
        color=COLOURS[colour],
        linewidth=1.8,
        linestyle=style,
        marker=marker,
        label=name or None,
    )


def _ranks_axis(axes: Any, ranks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [_short(number) for number in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks, 8 on a node", color=TEXT)


def _short(number: float) -> str:
    return f"{number / 1024:.0f}k" if number >= 1024 else f"{number:.0f}"


def _finish(axes: Any, unit: str, title: str, log: bool = False, below: bool = False) -> None:
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.set_ylabel(unit, color=TEXT)
    axes.set_title(title, loc="left", size=11, color=TEXT, pad=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(FAINT)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.6)
    else:
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
        axes.legend(frameon=False, fontsize=9, labelcolor=TEXT, ncols=2, **place)
