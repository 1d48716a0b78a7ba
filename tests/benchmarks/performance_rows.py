"""Rows of the page about performance: what was seen, beside what was aimed at."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.benchmarks.page import NONE, table
from tests.benchmarks.performance_model import table_bytes
from tests.benchmarks.performance_rounds import Times, difference, ratio
from tests.benchmarks.performance_runs import (
    BARE,
    DELAY_MILLISECONDS,
    LINKS,
    LOGGED,
    MANY_ROWS,
    QUANTIZED,
    ROWS,
    Measured,
    best_of_ours,
)

DDP_AIMS = {ROWS: 12.0, MANY_ROWS: 100.0}
LINK_AIMS = {1000: 0.95, 200: 0.85}
QUANTIZED_AIMS = {200: 0.65}
NOT_RUN = "Not measured in this run."


@dataclass(frozen=True)
class Row:
    """One line of the summary."""

    name: str
    value: float | None = None
    """None: not measured."""
    aim: float | None = None
    at_least: bool = False
    """Whether more is better."""
    rounds: Sequence[float] = ()
    """The value in single rounds."""

    @property
    def missed(self) -> bool:
        """Whether the aim was missed."""
        if self.value is None or self.aim is None:
            return False
        return not (self.value >= self.aim if self.at_least else self.value <= self.aim)

    def cells(self) -> list[str]:
        """Return what stands in the columns."""
        seen = (
            NONE
            if self.value is None
            else f"**{_number(self.value)}**"
            if self.missed
            else _number(self.value)
        )
        sign = "at least" if self.at_least else "at most"
        aim = NONE if self.aim is None else f"{sign} {_number(self.aim)}"
        spread = (
            f"{_number(min(self.rounds))} to {_number(max(self.rounds))}"
            if len(self.rounds) > 1
            else NONE
        )
        return [self.name, seen, aim, spread]


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _compared(name: str, times: Times, distrec: str, other: str, aim: float | None = None) -> Row:
    if distrec not in times or other not in times:
        return Row(name, aim=aim)
    value, rounds = ratio(times, distrec, other)
    return Row(name, value, aim, rounds=rounds)


def summary(measured: Measured) -> list[Row]:
    """Return the lines of the summary."""
    local = measured.local
    rows = [
        _compared(
            "prefetched / by hand, prefetched",
            local,
            "ours, prefetched",
            "by hand, prefetched",
            1.00,
        ),
        _compared(
            "prefetched, logged / by hand, prefetched",
            local,
            "ours, prefetched, logged",
            "by hand, prefetched",
            1.05,
        ),
        _compared("not prefetched / by hand", local, "ours", "by hand", 1.02),
        _compared("not prefetched, logged / by hand", local, "ours, logged", "by hand"),
    ]
    late = _compared("", measured.delayed, "by hand, prefetched", "by hand")
    rows.append(
        _compared(
            f"every exchange takes {DELAY_MILLISECONDS:.0f} ms: prefetched / not prefetched (aim: "
            "the ratio by hand)",
            measured.delayed,
            "ours, prefetched",
            "ours",
            late.value,
        )
    )
    for rate in LINKS:
        times = measured.links[rate].times if rate in measured.links else {}
        device = f"on a link of {rate} Mbit/s"
        hand, aim = "by hand, prefetched", QUANTIZED_AIMS.get(rate)
        rows.append(
            _compared(
                f"{device}: prefetched / {hand}", times, "ours, prefetched", hand, LINK_AIMS[rate]
            )
        )
        rows.append(
            _compared(f"{device}: prefetched, quantized / {hand}", times, QUANTIZED, hand, aim)
        )
    rows += [_against_ddp(measured, num_rows) for num_rows in DDP_AIMS]
    for num_rows, ranks in measured.memory.items():
        share = table_bytes(num_rows) / len(ranks)
        entry = f"of all tables' share of a rank, {num_rows:,} rows"
        rows.append(
            Row(f"bytes of shards {entry}", max(rank.shards for rank in ranks) / share, 1.05)
        )
        rows.append(
            Row(f"growth of the process {entry}", max(rank.growth for rank in ranks) / share)
        )
    return rows


def _against_ddp(measured: Measured, num_rows: int) -> Row:
    name = f"Lightning's DDP / ours, {num_rows:,} rows"
    row = _compared(name, measured.against_ddp.get(num_rows, {}), "DDP", best_of_ours())
    rounds = () if num_rows == MANY_ROWS else row.rounds
    return Row(name, row.value, DDP_AIMS[num_rows], at_least=True, rounds=rounds)


def summary_table(rows: list[Row]) -> str:
    """Return the summary as Markdown."""
    return table(["", "seen", "aim", "in single rounds"], [row.cells() for row in rows], 1)


def steps_table(
    times_by_column: dict[str, Times], names: Sequence[str] = (*BARE, *LOGGED, QUANTIZED)
) -> str:
    """Return the medians in milliseconds. times_by_column: heading -> times."""
    times_by_column = {heading: times for heading, times in times_by_column.items() if times}
    if not times_by_column:
        return NOT_RUN
    rows = [
        [
            name,
            *(
                f"{times[name].milliseconds:.1f}" if name in times else NONE
                for times in times_by_column.values()
            ),
        ]
        for name in names
        if any(name in times for times in times_by_column.values())
    ]
    return table(["ms a step", *times_by_column], rows, 1)


def links_table(measured: Measured) -> str:
    """Return what the links really carried."""
    if not measured.links:
        return NOT_RUN
    rows = [
        [rate, f"{link.one_way:.0f}", f"{link.both_ways:.0f}"]
        for rate, link in measured.links.items()
    ]
    return table(
        ["Mbit/s set", "long sends, one way", "an all-to-all of 0.5 MB, each way"], rows, 0
    )


def losses_said(measured: Measured) -> str:
    """Return how far apart the losses were, beside all this speed."""
    all_times = [
        measured.local,
        measured.delayed,
        *(link.times for link in measured.links.values()),
    ]

    def largest(first: str, other: str) -> str:
        actual = [
            difference(times, first, other)
            for times in all_times
            if first in times and other in times
        ]
        return NONE if not actual else f"{max(actual):.1e}" if max(actual) else "0, bitwise"

    pairs = [("ours", "ours, prefetched"), ("ours", "by hand"), ("ours", QUANTIZED)]
    return table(["losses of", "and of", "differ by"], [[a, b, largest(a, b)] for a, b in pairs], 2)


def machine() -> str:
    """Return what this machine is."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) for line in file if line.startswith("MemTotal:")) / 2**20
    gpu = ", and a GPU that was not used" if torch.cuda.is_available() else ""
    return (
        f"{os.cpu_count()} cores ({models[0] if models else 'unknown'}), {total:.0f} GiB of "
        f"memory{gpu}"
    )
