"""A picture of tables by ranks: what each rank holds, computes and sends for each of the largest tables."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.plan.planned_table import PlannedTable
from lightning_distrec.sharding.plan.sharding_plan import ShardingPlan
from lightning_distrec.sharding.plan.traffic import estimate_traffic
from lightning_distrec.units import format_bytes

MAX_TABLES = 24
MAX_RANKS = 64
"""Of more ranks there is no such picture: its cells would be lines."""
MAX_NUMBERS = 8
"""Up to this number of ranks, cells have their numbers written in."""
MAX_LETTERS = 28
TEXT, EMPTY = "#1c2024", "#e9edf1"


def cells(plan: ShardingPlan, tables: list[PlannedTable]) -> dict[str, NDArray[np.float64]]:
    """Return quantity -> (tables, ranks): bytes held, milliseconds where they are known, bytes sent in a step."""
    ranks = plan.num_ranks
    held, time, sent = (np.zeros((len(tables), ranks)) for _ in range(3))
    for row, table in enumerate(tables):
        elements = table.shard_rows * table.shard_columns
        of_shards = elements * (table.element_bytes + table.update_bytes_per_element)
        held[row] = np.bincount(table.ranks, of_shards + table.shard_rows * table.update_bytes_per_row, minlength=ranks)
        if table.milliseconds is not None:
            time[row] = np.bincount(table.ranks, table.milliseconds, minlength=ranks)
        sent[row] = estimate_traffic([table], plan.layout, plan.batch_size, plan.comms).sent()
    found = {"memory": held}
    if any(table.milliseconds is not None for table in tables):
        found["estimated ms"] = time
    if ranks > 1:
        found["sent per step"] = sent
    return found


def draw_heat_map(plan: ShardingPlan) -> Any:
    """Return the picture. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    tables = sorted(plan.tables.values(), key=lambda table: -table.num_bytes)[:MAX_TABLES]
    found = cells(plan, tables)
    figure = Figure(figsize=(9.5, 1.4 + 0.27 * len(tables)), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    for number, (axes, (what, values)) in enumerate(
        zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True)
    ):
        shown = np.where(values > 0, values, np.nan)
        axes.set_facecolor(EMPTY)
        largest = max(float(values.max()), 1e-12)
        axes.imshow(shown, cmap="YlGnBu", vmin=0, vmax=largest, aspect="auto", interpolation="nearest")
        if plan.num_ranks <= MAX_NUMBERS:
            for (row, rank), value in np.ndenumerate(values):
                if value > 0:
                    colour = "white" if value > 0.55 * largest else TEXT
                    text = f"{value:.3g}" if "ms" in what else format_bytes(value)
                    axes.text(rank, row, text, ha="center", va="center", size=7, color=colour)
        names = [_short(table.name) for table in tables] if number == 0 else []
        axes.set_yticks(range(len(names)), names)
        axes.set_xticks(range(plan.num_ranks) if plan.num_ranks <= 2 * MAX_NUMBERS else [0, plan.num_ranks - 1])
        axes.tick_params(colors=TEXT, labelsize=8, length=0)
        axes.set_xlabel("rank", color=TEXT, size=9)
        top = f"{largest:.3g} ms" if "ms" in what else format_bytes(largest)
        axes.set_title(f"{what}, up to {top}", loc="left", size=9.5, color=TEXT)
        for spine in axes.spines.values():
            spine.set_visible(False)
    which = "each table" if len(tables) == len(plan.tables) else f"the {len(tables)} largest tables"
    figure.suptitle(f"What each rank does for {which}", x=0.02, ha="left", size=11.5, color=TEXT)
    return figure


def _short(name: str) -> str:
    """Return the end of a name, by which tables differ."""
    name = name if len(name) <= MAX_LETTERS else f"...{name[3 - MAX_LETTERS :]}"
    return name.replace("$", r"\$")  # a dollar begins a formula to matplotlib
