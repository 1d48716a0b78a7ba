"""Writes the section about plans over a slow link of docs/performance.md from a run: our plan
against others.

    python -m tests.benchmarks.plan_quality [--quick] [--ranks 2 4] [--rates 50 200] [--rounds N]
    [--plans N] [--write]

All of it takes about fifteen minutes on two cores that do nothing else; it needs root, `ip` and
`tc`. It only prints the section, unless --write is given. Exits with 1 where something went wrong;
missed aims stand in bold.
"""

import argparse
import os
import sys
import time
from datetime import date
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

from lightning_distrec.sharding.planning.topology import NodeLayout  # noqa: E402
from tests.benchmarks import plan_quality_text as text  # noqa: E402
from tests.benchmarks.performance_rounds import CannotMeasure  # noqa: E402
from tests.benchmarks.performance_rows import machine  # noqa: E402
from tests.benchmarks.plan_quality_link import on_limited_link  # noqa: E402
from tests.benchmarks.plan_quality_turns import Job, Measured  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
TIMEOUT_SECONDS = 900.0


def main() -> int:
    """Measure, print, and write the section; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of few plans: to see that it works"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[2, 4], help="even numbers: half on each side"
    )
    parser.add_argument(
        "--rates", nargs="+", type=int, default=[50, 200], help="of the link, in Mbit/s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each plan")
    parser.add_argument("--plans", type=int, default=24, help="plans that take turns")
    parser.add_argument("--write", action="store_true", help=f"put the section into {PAGE.name}")
    options = parser.parse_args()
    rounds, num_plans = (1, 12) if options.quick else (options.rounds, options.plans)
    began, load = time.monotonic(), [os.getloadavg()[0]]
    results: dict[tuple[int, int], Measured] = {}
    notes, wrong = [], False
    job = Job(NodeLayout.from_node_sizes(1, 1), num_plans, rounds)
    for num_ranks in options.ranks:
        job = Job(NodeLayout.from_node_sizes(num_ranks // 2, num_ranks // 2), num_plans, rounds)
        for rate in options.rates:
            try:
                results[num_ranks, rate] = on_limited_link(job, rate, TIMEOUT_SECONDS)
            except CannotMeasure as reason:
                notes.append(f"- Not measured: {num_ranks} ranks, {rate} Mbit/s: {reason}.")
            except RuntimeError as problem:
                wrong = True
                _tell(f"went wrong: {problem}")
                notes.append(
                    f"- **Went wrong: {num_ranks} ranks, {rate} Mbit/s: "
                    f"{str(problem).splitlines()[-1]}**"
                )
            load.append(os.getloadavg()[0])
            _tell(
                f"{time.monotonic() - began:.0f} s: {num_ranks} ranks, {rate} Mbit/s; load "
                f"{load[-1]:.1f}"
            )
    when = (
        f"on {date.today()} at a load of {min(load):.1f} to {max(load):.1f} on "
        f"{os.cpu_count()} cores"
    )
    actual = text.section(results, notes, job, machine=machine(), when=when)
    print(actual)
    if options.write:
        PAGE.write_text(
            text.with_section(PAGE.read_text(encoding="utf-8"), actual), encoding="utf-8"
        )
        PAGE.with_name(text.DETAILS).write_text(text.cuts_csv(results), encoding="utf-8")
    _tell(f"{time.monotonic() - began:.0f} s, {text.missed(results)} aims missed")
    return int(wrong)


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
