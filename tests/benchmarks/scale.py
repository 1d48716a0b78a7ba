"""Plans tables for up to 4,096 ranks, of which there are none: what ranks would hold, send and wait
for.

    python -m tests.benchmarks.scale [--quick] [--write]

Ranks, tables and rows grow, one at a time. All of it takes about ten minutes of one core.
Milliseconds are torchrec's estimates for GPUs: read ratios and slopes.
"""

import sys
from dataclasses import replace

from tests.benchmarks.planning_jobs import Job
from tests.benchmarks.planning_one import Planned, run_one
from tests.benchmarks.report import start, table

BASE = Job(kind="zipf", num_tables=1000, num_ranks=1024, memory_gb=64)
RANKS = (8, 16, 64, 256, 1024, 4096)
TABLES = (100, 300, 1000, 3000)
ROW_FACTORS = (1, 10, 100)
QUICK = Job(kind="zipf", num_tables=12, num_ranks=16, memory_gb=64)
LIMIT_SECONDS = 600
GIGA, MIB = 1e9, 2**20
HEADER = [
    *("ranks", "tables", "GB of rows", "GB a rank, mean", "GB, fullest", "MiB on the node"),
    *("MiB to other nodes", "... most of a rank", "ms, mean", "ms, slowest", "lower bound"),
    *("s to plan", "sharding types"),
]


def jobs(quick: bool) -> list[Job]:
    """Return what is planned."""
    if quick:
        return [replace(QUICK, num_ranks=8), QUICK, replace(QUICK, row_factor=3)]
    grown = [replace(BASE, num_ranks=number) for number in RANKS]
    grown += [replace(BASE, num_tables=number) for number in TABLES]
    grown += [replace(BASE, row_factor=factor) for factor in ROW_FACTORS]
    return list(dict.fromkeys(grown))


def plan(job: Job) -> Planned:
    """Return what comes of a job in a process of its own. Raises RuntimeError: no plan."""
    planned = run_one("ours", job, LIMIT_SECONDS)
    if isinstance(planned, str):
        raise RuntimeError(planned)
    return planned


def cells(job: Job, planned: Planned) -> list[str]:
    """Return a line of the table."""
    facts = planned.facts
    types = sorted(facts["sharding_types"].items(), key=lambda pair: -pair[1])
    return [
        f"{job.num_ranks:,}",
        f"{job.num_tables:,}",
        f"{facts['row_bytes'] / GIGA:,.0f}",
        f"{facts['device_bytes_mean'] / GIGA:.2f}",
        f"{facts['device_bytes_max'] / GIGA:.2f}",
        f"{facts['bytes_within_nodes'] / MIB:,.0f}",
        f"{facts['bytes_across_nodes'] / MIB:,.0f}",
        f"{facts['bytes_across_nodes_max'] / MIB:,.0f}",
        f"{facts['milliseconds_mean']:.1f}",
        f"{planned.critical_path:.1f}",
        f"{planned.lower_bound:.1f}",
        f"{planned.seconds:.0f}",
        ", ".join(f"{number:,} {name}" for name, number in types),
    ]


def main() -> int:
    """Plan, print, and write the results; returns the exit status."""
    report = start("scale", __doc__)
    lines = []
    for job in jobs(report.options.quick):
        planned = report.attempt(f"{job}, {job.row_factor} times the rows", plan, job)
        if planned is not None:
            lines.append(cells(job, planned))
    report.sections.append(table(HEADER, lines, 0))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what another process returns is not a class of `__main__`.
    from tests.benchmarks import scale

    sys.exit(scale.main())
