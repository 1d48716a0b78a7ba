"""Host time of a training step: what the main thread of a rank does, while the tables' work is
small.

    python -m tests.benchmarks.host_time [--only tiny,8,2 ...] [--functions ours] [--files ours]
    [--write]

Contenders take turns on the same ranks: torchrec's TrainPipelineSparseDist written by hand,
Trainer.fit under torchrec_sharded, the same with a metric and a logged loss, and Lightning's loop
around next to nothing. For each: the main thread's processor time and the wall's time of a step,
and how many Python functions a step calls, by package. --functions lists the functions that a
contender calls most, --files the files that its time goes to. --write puts tables into
docs/performance.md.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

from tests.benchmarks.host_time_steps import CONTENDERS, Measured, Sizes, measure, times_by_file  # noqa: E402
from tests.benchmarks.page import NONE, table  # noqa: E402
from tests.support.ranks import run_on_ranks  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- host time: begin -->", "<!-- host time: end -->"
BATCHES = {"tiny": (8, 1_000), "normal": (512, 100_000)}
"""Examples per rank, rows of each table."""
CASES = ("tiny,8,2", "tiny,40,2", "tiny,8,4", "normal,8,2")
"""Batch, tables, ranks."""
HAND = "by hand, prefetched"


def main() -> None:
    """Measure, print, and write the section where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=CASES, metavar="BATCH,TABLES,RANKS", help="cases to run"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument(
        "--functions", choices=CONTENDERS, help="list the functions that this contender calls most"
    )
    parser.add_argument(
        "--files", choices=CONTENDERS, help="profile this contender alone, and list its files"
    )
    parser.add_argument(
        "--write", action="store_true", help="put the tables into docs/performance.md"
    )
    options = parser.parse_args()
    actual = {}
    for case in options.only:
        batch, num_tables, num_ranks = case.split(",")
        sizes = Sizes(*BATCHES[batch], int(num_tables))
        if options.files:
            files = run_on_ranks(
                times_by_file, int(num_ranks), sizes, options.files, timeout_seconds=300
            )[0]
            print(f"{case}, {options.files}: {files.total():.0f} us a step under a profiler")
            print(
                "\n".join(f"{time:6.0f} {file}" for file, time in files.most_common(40)), flush=True
            )
            continue
        actual[case] = run_on_ranks(
            measure, int(num_ranks), sizes, options.rounds, timeout_seconds=900
        )[0]
        print(
            f"{case}\n{times_table({case: actual[case]})}\n\n{calls_table(actual[case])}\n",
            flush=True,
        )
        if options.functions:
            for name, number in actual[case][options.functions].functions.most_common(60):
                print(f"{number:5} {name}")
    if options.write:
        write(actual)


def times_table(actual: dict[str, dict[str, Measured]]) -> str:
    """Return medians of a step in milliseconds, and what they are of the loop by hand. found: case
    -> contender."""
    rows = []
    for case, contenders in actual.items():
        hand = contenders[HAND]
        for name, seen in contenders.items():
            cells = [f"{seen.thread:.2f}", f"{seen.thread / hand.thread:.2f}"]
            cells += [f"{seen.wall:.2f}", f"{seen.wall / hand.wall:.2f}"]
            rows.append([case.replace(",", ", "), name, *cells])
    return table(
        ["batch, tables, ranks", "", "main thread, ms", "of by hand", "wall, ms", "of by hand"],
        rows,
        2,
    )


def calls_table(contenders: dict[str, Measured]) -> str:
    """Return how many Python functions a step calls in the main thread, by package."""
    packages = ["lightning_distrec", "lightning", "torchrec", "torch", "torchmetrics", "others"]
    rows = []
    for name, seen in contenders.items():
        per_package = seen.calls_by_package(packages[:-1])
        cells = [per_package.get(package, NONE) for package in packages]
        rows.append([name, *cells, sum(per_package.values()), seen.builtins])
    return table(["calls a step", *packages, "all", "and builtins"], rows, 1)


def write(actual: dict[str, dict[str, Measured]]) -> None:
    """Put the tables into the page's section."""
    first = next(iter(actual))
    section = "\n\n".join([
        BEGIN,
        "## Host time of a step",
        "`python -m tests.benchmarks.host_time --write` writes this section. Batches: tiny is 8 "
        "examples of tables "
        "of 1,000 rows, so that little is left but Python; normal is 512 of 100,000. Medians of "
        "the steps of all "
        "rounds; contenders take turns. The main thread's time is what the processor spent on it.",
        times_table(actual),
        f"Python functions that the main thread calls in a step ({first.replace(',', ', ')}), "
        "which no neighbour on the machine disturbs:",
        calls_table(actual[first]),
        END,
    ])
    page = PAGE.read_text(encoding="utf-8")
    if BEGIN in page:
        page = page[: page.index(BEGIN)] + section + page[page.index(END) + len(END) :]
    else:
        page = page.replace("## On a GPU", f"{section}\n\n## On a GPU")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
