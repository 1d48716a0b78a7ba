"""Times steps of Trainer.fit against a loop written by hand with torchrec, over links of limited
rate too, and against Lightning's DDP.

    python -m tests.benchmarks.performance [--only here link ddp] [--rounds 7] [--quick] [--write]

All of it takes about ten minutes on two cores that do nothing else; links need root, `ip` and `tc`.
Contenders start from the same weights, read the same batches and take turns in the same processes.
Exits with 1 where something went wrong, losses that differ for example.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.benchmarks.limited_link import run_on_link
from tests.benchmarks.performance_contenders import CONTENDERS
from tests.benchmarks.performance_model import Batches, table_bytes
from tests.benchmarks.report import NONE, CannotMeasure, Report, Row, ratio_row, start, table
from tests.benchmarks.turns import (
    Times,
    Turn,
    difference,
    in_silence,
    join_ranks,
    time_contenders,
)
from tests.support.ranks import run_on_ranks

NUM_RANKS = 2
HAND, HAND_PREFETCHED = "by hand", "by hand, prefetched"
OURS, OURS_PREFETCHED = "ours", "ours, prefetched"
LOGGED, QUANTIZED, DDP = "ours, prefetched, logged", "ours, prefetched, quantized", "DDP"
BARE = (HAND, HAND_PREFETCHED, OURS, OURS_PREFETCHED)
MBIT_PER_SECOND = (1000, 200)
ROWS, MANY_ROWS = 100_000, 1_000_000
SHORT_TURN, SHORTEST_TURN = Turn(3, 5, 3), Turn(1, 3, 1)
COPIES_OF_DDP = 3
"""What DDP holds of every table on each rank: its rows, their gradient, and the bucket that
travels."""
SPARE_BYTES = 4 * 2**30
LOSS_LIMIT = 1e-6


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two contenders in one place."""

    place: str
    above: str
    below: str
    aim: float | None = None
    at_least: bool = False

    def row(self, times: Times) -> Row:
        """Return the ratio of their steps."""
        name = f"{self.place}: {self.above} / {self.below}"
        if self.above not in times or self.below not in times:
            return Row(name, aim=self.aim, at_least=self.at_least)
        above, below = times[self.above], times[self.below]
        rounds = ratio_row(name, above.medians(), below.medians()).rounds
        ratio = above.milliseconds / below.milliseconds
        return Row(name, ratio, self.aim, self.at_least, rounds)


HERE = "here"
LINKS = {rate: f"link of {rate} Mbit/s" for rate in MBIT_PER_SECOND}
AGAINST_DDP = {num_rows: f"{num_rows:,} rows" for num_rows in (ROWS, MANY_ROWS)}
COMPARISONS = (
    Comparison(place=HERE, above=OURS_PREFETCHED, below=HAND_PREFETCHED, aim=1.00),
    Comparison(place=HERE, above=LOGGED, below=HAND_PREFETCHED, aim=1.05),
    Comparison(place=HERE, above=OURS, below=HAND, aim=1.02),
    Comparison(place=LINKS[1000], above=OURS_PREFETCHED, below=HAND_PREFETCHED, aim=0.95),
    Comparison(place=LINKS[1000], above=QUANTIZED, below=HAND_PREFETCHED),
    Comparison(place=LINKS[200], above=OURS_PREFETCHED, below=HAND_PREFETCHED, aim=0.85),
    Comparison(place=LINKS[200], above=QUANTIZED, below=HAND_PREFETCHED, aim=0.65),
    Comparison(place=AGAINST_DDP[ROWS], above=DDP, below=OURS_PREFETCHED, aim=12.0, at_least=True),
    Comparison(
        place=AGAINST_DDP[MANY_ROWS], above=DDP, below=OURS_PREFETCHED, aim=100.0, at_least=True
    ),
)


def take_turns(turn_of: dict[str, Turn], rounds: int, num_rows: int = ROWS) -> Times:
    """Collective. Time contenders on this rank, each with turns of its own length."""
    join_ranks()
    most = max(turn.steps for turn in turn_of.values())
    batches = Batches(num_rows, most, dist.get_rank())
    with in_silence():
        contenders = {}
        for name, turn in turn_of.items():
            contenders[name] = CONTENDERS[name](num_rows, batches, turn)
        return time_contenders(contenders, rounds)


def on_this_machine(turn_of: dict[str, Turn], rounds: int, num_rows: int = ROWS) -> Times:
    """Return what ranks of this machine measure."""
    limit = 120.0 + rounds * len(turn_of) * 30.0
    arguments = (turn_of, rounds, num_rows)
    return run_on_ranks(take_turns, NUM_RANKS, *arguments, timeout_seconds=limit)[0]


def against_ddp_with_many_rows(rounds: int) -> Times:
    """Return what is measured one after the other: DDP leaves no memory for anything else."""
    needed = NUM_RANKS * COPIES_OF_DDP * table_bytes(MANY_ROWS) + SPARE_BYTES
    free = _available_bytes()
    if free < needed:
        raise CannotMeasure(
            f"DDP needs {needed / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free"
        )
    sharded = on_this_machine({OURS_PREFETCHED: Turn()}, rounds, MANY_ROWS)
    return sharded | on_this_machine({DDP: SHORTEST_TURN}, 1, MANY_ROWS)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(report: Report, parts: Sequence[str], rounds: int, quick: bool) -> dict[str, Times]:
    """Return place -> times."""
    times: dict[str, Times] = {}
    turn = SHORT_TURN if quick else Turn()
    if "here" in parts:
        turn_of = dict.fromkeys((*BARE, LOGGED), turn)
        times[HERE] = report.attempt(HERE, on_this_machine, turn_of, rounds)
    if "link" in parts:
        turn_of = dict.fromkeys((*BARE, QUANTIZED), turn)
        for rate, place in list(LINKS.items())[: 1 if quick else None]:
            arguments = (place, run_on_link, take_turns, turn_of, rounds)
            times[place] = report.attempt(*arguments, mbit_per_second=rate)
    if "ddp" in parts:
        turn_of = {OURS_PREFETCHED: turn, DDP: SHORT_TURN}
        place = AGAINST_DDP[ROWS]
        times[place] = report.attempt(place, on_this_machine, turn_of, rounds)
    if "ddp" in parts and not quick:
        place = AGAINST_DDP[MANY_ROWS]
        times[place] = report.attempt(place, against_ddp_with_many_rows, rounds)
    return {place: measured for place, measured in times.items() if measured is not None}


def compare_losses(report: Report, place: str, times: Times) -> None:
    """Note where contenders did not train one model on the same batches."""
    pairs = (
        (HAND, HAND_PREFETCHED, LOSS_LIMIT),
        (HAND, OURS, LOSS_LIMIT),
        (OURS, OURS_PREFETCHED, 0.0),
    )
    for first, other, limit in pairs:
        if first in times and other in times:
            largest = difference(times, first, other)
            words = f"{place}: losses of {first} and {other} differ by {largest:.1e}"
            report.log(words)
            if not largest <= limit:
                report.note(words)


def steps_table(times_by_place: dict[str, Times]) -> str:
    """Return the medians in milliseconds."""
    rows = []
    for name in CONTENDERS:
        cells = []
        for times in times_by_place.values():
            cells.append(f"{times[name].milliseconds:.1f}" if name in times else NONE)
        if set(cells) != {NONE}:
            rows.append([name, *cells])
    return table(["ms a step", *times_by_place], rows)


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    parts = ("here", "link", "ddp")
    report = start(
        "performance",
        __doc__,
        only={"nargs": "+", "choices": parts, "default": parts},
        rounds={"type": int, "default": 7, "help": "turns of each contender"},
    )
    options = report.options
    rounds = 1 if options.quick else options.rounds
    times = measure(report, options.only, rounds, options.quick)
    for place, measured in times.items():
        compare_losses(report, place, measured)
    for comparison in COMPARISONS:
        if comparison.place in times:
            report.rows.append(comparison.row(times[comparison.place]))
    report.sections.append(steps_table(times))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import performance

    sys.exit(performance.main())
