"""The section about plans over a slow link: its table, what stands around it, and where it stands
in the page."""

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_distrec.units import format_bandwidth
from tests.benchmarks.checkpointing_text import BEFORE
from tests.benchmarks.page import NONE, table
from tests.benchmarks.plan_quality_model import BATCH_SIZE, SIZES
from tests.benchmarks.plan_quality_turns import (
    OURS,
    OURS_DEFAULT,
    TORCHRECS,
    TORCHRECS_DEFAULT,
    Job,
    Measured,
)

BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
DETAILS = "performance_plans.csv"
"""The file next to the page that has each sharding type."""
AIM = 1.10
"""The most that our plan's step may take, in units of the best that was timed."""
FOUND = """\
- **The aim is met on all four lines.**
- **Rank correlation** of at least 0.9 is met on three lines of four. Before gloo's exchanges between nodes posted their
  receives first, it was 0.76, 0.73, 0.93 and 0.89: how far both directions overlapped was chance.
- **Noise**: a planner ran beside the last line."""
"""What was seen in these runs and in those before, put here by hand."""
PLANNERS = (OURS, OURS_DEFAULT, TORCHRECS, TORCHRECS_DEFAULT)

Results = Mapping[tuple[int, int], Measured]
"""Ranks, Mbit/s -> what was measured."""


def over_best(measured: Measured, planner: str) -> float:
    """Return the step time of a planner's plan over that of the best plan."""
    best = min(tried.milliseconds for tried in measured.plans.values())
    return measured.plans[measured.equal_plans[planner]].milliseconds / best


def rank_correlation(first: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's: how far two lists order the same things alike, from -1 to 1; 0 where one
    orders nothing."""
    a, b = (_ranks(values) for values in (first, other))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return each value's place in their order; equal values share the mean of theirs."""
    entry = np.asarray(values, dtype=float)
    return (entry[:, None] > entry[None, :]).sum(axis=1) + (entry[:, None] == entry[None, :]).sum(
        axis=1
    ) / 2


def missed(results: Results) -> int:
    """Return on how many links our plan misses its aim."""
    return sum(over_best(measured, OURS) > AIM for measured in results.values())


def plans_table(results: Results) -> str:
    """Return a line for each link and number of ranks."""
    header = [
        *("link, Mbit/s", "ranks", "plans timed", "best, ms", "turns differ by", "worst / best"),
        *("ours / best", "ours, default bandwidths / best"),
        *("torchrec's, measured bandwidths / best", "torchrec's / best"),
        *("rank correlation", "... by default bandwidths"),
    ]
    return table(header, [_line(*key, measured) for key, measured in results.items()], 0)


def _line(num_ranks: int, mbit_per_second: int, measured: Measured) -> list[str]:
    tried = list(measured.plans.values())
    times = [first.milliseconds for first in tried]
    ratios = [f"{over_best(measured, planner):.3f}" for planner in PLANNERS]
    if over_best(measured, OURS) > AIM:
        ratios[0] = f"**{ratios[0]}**"
    return [
        str(mbit_per_second),
        str(num_ranks),
        f"{len(tried)} of {measured.size:,}",
        f"{min(times):.1f}",
        f"{float(np.median([first.spread for first in tried])):.2f}",
        f"{max(times) / min(times):.2f}",
        *ratios,
        f"{rank_correlation([first.estimate for first in tried], times):.2f}",
        f"{rank_correlation([first.estimate_default for first in tried], times):.2f}",
    ]


def cuts_csv(results: Results) -> str:
    """Return a CSV: step times of the best plan, as estimated, of each sharding type, with our
    plan's and the best."""
    cuts = list(
        dict.fromkeys(
            name for m in results.values() for name in m.equal_plans if name.startswith("all ")
        )
    )
    rows = []
    for (num_ranks, rate), measured in results.items():
        times = {
            name: measured.plans[is_equal].milliseconds
            for name, is_equal in measured.equal_plans.items()
        }
        cells = [f"{times[cut]:.1f}" if cut in times else NONE for cut in cuts]
        rows.append([
            f"{rate} Mbit/s, {num_ranks} ranks",
            f"{times[OURS]:.1f}",
            *cells,
            believed(measured),
        ])
    lines = [["ms per step", "ours", *cuts, "measured cross_node"], *rows]
    return "".join(",".join(cell.replace(",", ":") for cell in line) + "\n" for line in lines)


def believed(measured: Measured) -> str:
    """Return the bandwidth that was measured over the link."""
    return format_bandwidth(measured.bandwidths.cross_node.bytes_per_second)


def section(results: Results, notes: Sequence[str], job: Job, *, machine: str, when: str) -> str:
    """Return the section, lines that mark it included.

    notes: what went wrong, or is missing. machine, when (the date, and the load): in words.
    """
    tables = ", ".join(f"{rows:,} x {dim} ({ids})" for rows, dim, ids in SIZES.values())
    parts = [
        BEGIN,
        "## Plans over a slow link",
        f"""\
Is the plan with the shortest estimate the fastest? `python -m tests.benchmarks.plan_quality` writes this section and
its numbers, {when}. The machine has {machine}. Half of the ranks are in each of two network namespaces, joined by a
limited link. The model has one layer and {len(SIZES)} tables. Rows x dim (ids per example): {tables}.
{BATCH_SIZE} examples per rank; SGD.""",
        plans_table(results),
        *(["\n".join(notes)] if notes else []),
        f"""\
Plans take turns in one set of processes, in {job.rounds} rounds of {job.turn.steps} steps, of which {job.turn.counted}
count; compared are first quartiles. Timed are our plan and torchrec's with measured and with default bandwidths, the
best plan of each sharding type, and a random sample. "Turns differ by" is the slowest turn over the fastest: smaller
differences say little. [This file]({DETAILS}) has the best plan of each sharding type.
"Rank correlation" is Spearman's, of estimates and steps. **Bold** misses its aim,
{AIM:.2f} at most.""",
        FOUND,
        END,
    ]
    return "\n\n".join(parts)


def with_section(page: str, text: str) -> str:
    """Return a page with this section in the place of the one that it has, or before BEFORE, or at
    its end."""
    first, last = page.find(BEGIN), page.find(END)
    if 0 <= first < last:
        return page[:first] + text + page[last + len(END) :]
    if f"\n{BEFORE}\n" in page:
        return page.replace(f"\n{BEFORE}\n", f"\n{text}\n\n{BEFORE}\n", 1)
    return f"{page.rstrip()}\n\n{text}\n"
