"""The plans that docs/scale.md is drawn from: ranks, tables and rows grow, one at a time. They need
no ranks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.benchmarks.planning_jobs import Job
from tests.benchmarks.planning_one import Planned, run_one

BASE = Job(kind="zipf", num_tables=1000, num_ranks=1024, memory_gb=64)
RANKS = (8, 16, 64, 256, 1024, 4096)
TABLES = (100, 300, 1000, 3000)
ROWS = (1, 10, 100)
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Point:
    """A job and what came of it."""

    job: Job
    planned: Planned


@dataclass
class Points:
    """What was planned, in order of what grows."""

    ranks: list[Point]
    tables: list[Point]
    rows: list[Point]


def jobs(quick: bool = False) -> dict[str, list[Job]]:
    """Return what grows -> its jobs. quick: the same of small size."""
    base, ranks, tables, rows = BASE, RANKS, TABLES, ROWS
    if quick:
        base = replace(BASE, num_tables=12, num_ranks=16)
        ranks, tables, rows = (8, 16), (6, 12), (1, 3)
    return {
        "ranks": [replace(base, num_ranks=number) for number in ranks],
        "tables": [replace(base, num_tables=number) for number in tables],
        "rows": [replace(base, rows_times=times) for times in rows],
    }


def reckon(quick: bool = False, tell: Callable[[str], None] = lambda _: None) -> Points:
    """Return all points. Each is planned once, in a process of its own. Raises RuntimeError: one
    came to no plan."""
    actual: dict[Job, Point] = {}

    def point(job: Job) -> Point:
        if job not in actual:
            planned = run_one("ours", job, LIMIT_SECONDS)
            if isinstance(planned, str):
                raise RuntimeError(f"{job}, {job.rows_times} times the rows: {planned}")
            actual[job] = Point(job, planned)
            tell(
                f"{job}, {job.rows_times} times the rows: {planned.seconds:.1f} s, "
                f"{planned.critical_path:.2f} ms"
            )
        return actual[job]

    return Points(**{
        growing: [point(job) for job in some] for growing, some in jobs(quick).items()
    })


def save(points: Points, path: Path) -> None:
    """Write the points as JSON."""
    path.write_text(json.dumps(asdict(points), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Points:
    """Return the points of a file that `save` wrote."""
    read = json.loads(path.read_text(encoding="utf-8"))
    return Points(**{growing: _points(some) for growing, some in read.items()})


def _points(some: Sequence[dict[str, dict]]) -> list[Point]:  # type: ignore[type-arg]
    return [Point(Job(**first["job"]), Planned(**first["planned"])) for first in some]
