"""Measures the host time of a training step: what the main thread of a rank does, while the tables'
work is small.

    python -m tests.benchmarks.host_time [--only tiny,8,2 ...] [--functions ours] [--quick] [--write]

Contenders take turns on the same ranks: torchrec's TrainPipelineSparseDist written by hand,
Trainer.fit under torchrec_sharded, and the same with a metric and a logged loss. For each: the main
thread's processor time and the wall's time of a step, and how many Python functions a step calls,
by package. --functions lists those that a contender
calls most. A case is a batch, tables and ranks: tiny is 8 examples of tables of 1,000 rows, so that
little is left but Python; normal is 512 of 100,000.
"""

import sys

from tests.benchmarks.host_calls import CONTENDERS, HAND, Measured, Sizes, measure
from tests.benchmarks.report import NONE, start, table
from tests.support.ranks import run_on_ranks

BATCHES = {"tiny": (8, 1_000), "normal": (512, 100_000)}
"""Examples per rank, rows of each table."""
CASES = ("tiny,8,2", "tiny,40,2", "tiny,8,4", "normal,8,2")
PACKAGES = ["lightning_distrec", "lightning", "torchrec", "torch", "torchmetrics"]
HEADER = ["batch, tables, ranks", "", "main thread, ms", "of by hand", "wall, ms", "of by hand"]


def measure_case(case: str, rounds: int) -> dict[str, Measured]:
    """Return what rank 0 measures. case: batch, tables, ranks."""
    batch, num_tables, num_ranks = case.split(",")
    sizes = Sizes(*BATCHES[batch], int(num_tables))
    return run_on_ranks(measure, int(num_ranks), sizes, rounds, timeout_seconds=900)[0]


def time_rows(case: str, contenders: dict[str, Measured]) -> list[list[str]]:
    """Return medians of a step in milliseconds, and what they are of the loop by hand."""
    rows, hand = [], contenders[HAND]
    for name, measured in contenders.items():
        thread = [f"{measured.thread:.2f}", f"{measured.thread / hand.thread:.2f}"]
        wall = [f"{measured.wall:.2f}", f"{measured.wall / hand.wall:.2f}"]
        rows.append([case.replace(",", ", "), name, *thread, *wall])
    return rows


def calls_table(case: str, contenders: dict[str, Measured]) -> str:
    """Return how many Python functions a step calls in the main thread, by package."""
    columns, rows = [*PACKAGES, "others"], []
    for name, measured in contenders.items():
        calls = measured.calls_by_package(PACKAGES)
        cells = [calls.get(package, NONE) for package in columns]
        rows.append([name, *cells, calls.total(), measured.num_builtins])
    return table([f"calls a step: {case}", *columns, "all", "and builtins"], rows)


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "host_time",
        __doc__,
        only={"nargs": "+", "default": CASES, "metavar": "BATCH,TABLES,RANKS"},
        rounds={"type": int, "default": 5, "help": "turns of each contender"},
        functions={"choices": CONTENDERS, "help": "list what this contender calls most"},
    )
    options = report.options
    cases, rounds = options.only, options.rounds
    if options.quick:
        cases, rounds = CASES[:1], 1
    rows, calls = [], []
    for case in cases:
        measured = report.attempt(case, measure_case, case, rounds)
        if measured is None:
            continue
        rows += time_rows(case, measured)
        calls.append(calls_table(case, measured))
        if options.functions:
            for name, number in measured[options.functions].functions.most_common(60):
                print(f"{number:5} {name}")
    report.sections += [table(HEADER, rows, 2), *calls]
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import host_time

    sys.exit(host_time.main())
