"""Writes the section about planning of docs/performance.md from a run: time to plan, and plans
against torchrec's own.

    python -m tests.benchmarks.planning [--only time problems quality] [--quick] [--limit SECONDS]
    [--write]

All of it takes about 40 minutes on one core, most of them torchrec's planner's. It only prints the
section, unless --write is given. Exits with 1 where our planner came to no plan; missed aims stand
in bold.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the processes

from tests.benchmarks import planning_text as text  # noqa: E402
from tests.benchmarks.checkpointing_text import with_section  # noqa: E402
from tests.benchmarks.performance_rows import machine, summary_table  # noqa: E402
from tests.benchmarks.planning_rows import compared_csv, failures, summary, times_table  # noqa: E402
from tests.benchmarks.planning_runs import Measured, measure  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
PARTS = ("time", "problems", "quality")


def main() -> int:
    """Measure, print, and write the section; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; without it, all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small jobs only: to see that it works"
    )
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds that torchrec's planner may take for a set"
    )
    parser.add_argument("--write", action="store_true", help=f"put the section into {PAGE.name}")
    options = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]

    def tell(message: str) -> None:
        _tell(f"{time.monotonic() - began:.0f} s: {message}")

    measured = measure(options.only, options.limit, options.quick, tell)
    actual = _section(measured, load)
    print(actual)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(page, actual, text.BEGIN, text.END), encoding="utf-8")
        if measured.compared:
            PAGE.with_name(text.DETAILS).write_text(compared_csv(measured), encoding="utf-8")
    missed = sum(row.missed for row in summary(measured))
    tell(f"{missed} aims missed, load {os.getloadavg()[0]:.1f}")
    return int(bool(failures(measured)))


def _section(measured: Measured, load: float) -> str:
    return text.section(
        summary_table(summary(measured)),
        times_table(measured.timed) if measured.timed else "",
        times_table(measured.problems) if measured.problems else "",
        [f"- **Went wrong: {failure}**" for failure in failures(measured)],
        machine=machine(),
        limit_seconds=measured.limit_seconds,
        load=load,
    )


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
