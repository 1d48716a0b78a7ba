"""Measures the time to plan, and compares plans with those of torchrec's planner.

    python -m tests.benchmarks.planning [--only time problems quality] [--limit SECONDS] [--quick]
    [--write]

All of it takes about 40 minutes on one core, most of them torchrec's planner's. Critical paths do
not depend on the load: the search counts its steps. Exits with 1 where our planner came to no plan.
"""

import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from tests.benchmarks.planning_jobs import PROBLEMS, TIMED, Job, Timed, compared_jobs
from tests.benchmarks.planning_one import Planned, run_one
from tests.benchmarks.report import NONE, Report, Row, start, table

PATIENCE = 10
"""How many times the aim our planner may take before it is ended."""
ROUNDING = 1e-9
"""By so much two sums of the same numbers may differ."""
NOT_TRIED = "not tried"
HEADER = [
    *("set, tables x ranks", "seconds", "MiB of the process", "torchrec's seconds"),
    *("critical path / torchrec's", "... / lower bound"),
]


@dataclass(frozen=True)
class Outcome:
    """What both planners came to; a text is why one came to nothing."""

    job: Job
    ours: Planned | str
    default: Planned | str

    @property
    def ratio(self) -> float | None:
        """Critical path of our plan over that of torchrec's planner."""
        if isinstance(self.ours, str) or isinstance(self.default, str):
            return None
        return self.ours.critical_path / self.default.critical_path

    @property
    def gap(self) -> float | None:
        """Critical path of our plan over the lower bound of any."""
        if isinstance(self.ours, str) or not self.ours.lower_bound:
            return None
        return self.ours.critical_path / self.ours.lower_bound

    def cells(self) -> list[str]:
        """Return a line of the table."""
        memory = NONE
        if not isinstance(self.ours, str):
            memory = f"{self.ours.peak_bytes / 2**20:,.0f}"
        seconds = [_seconds(self.ours), memory, _seconds(self.default)]
        return [str(self.job), *seconds, _decimals(self.ratio), _decimals(self.gap)]


def _seconds(planned: Planned | str) -> str:
    if isinstance(planned, Planned):
        return f"{planned.seconds:.1f}"
    return planned if len(planned) < 40 else "no plan"  # torchrec's reasons are whole paragraphs


def _decimals(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def plan(job: Job, limit_seconds: float, default_limit_seconds: float) -> Outcome:
    """Run both planners, one after the other."""
    ours = run_one("ours", job, limit_seconds)
    if not default_limit_seconds:
        return Outcome(job, ours, NOT_TRIED)
    return Outcome(job, ours, run_one("default", job, default_limit_seconds))


def plan_timed(report: Report, jobs: Iterable[Timed]) -> list[Outcome]:
    """Return the outcomes of jobs whose times have aims, which become rows of the report."""
    outcomes = []
    for timed in jobs:
        outcome = plan(timed.job, PATIENCE * timed.aim_seconds, timed.default_limit_seconds)
        outcomes.append(outcome)
        name = f"{timed.job}: seconds to plan"
        seconds = outcome.ours.seconds if isinstance(outcome.ours, Planned) else None
        report.rows.append(Row(name, seconds, timed.aim_seconds))
        report.log(" | ".join(outcome.cells()))
    return outcomes


def plan_compared(report: Report, jobs: Iterable[Job], limit_seconds: float) -> list[Outcome]:
    """Return the outcomes of jobs whose plans are compared with those of torchrec's planner."""
    outcomes = []
    for job in jobs:
        outcomes.append(plan(job, PATIENCE * limit_seconds, limit_seconds))
        report.log(" | ".join(outcomes[-1].cells()))
    return outcomes


def quality_rows(outcomes: list[Outcome]) -> list[Row]:
    """Return means and extremes over all sets of tables."""
    rows = []
    ratios = [outcome.ratio for outcome in outcomes if outcome.ratio is not None]
    gaps = [outcome.gap for outcome in outcomes if outcome.gap is not None]
    if ratios:
        name = f"critical path / torchrec's, mean over {len(ratios)} sets of tables"
        rows.append(Row(name, statistics.mean(ratios), 1.0))
        rows.append(Row("... the worst of them", max(ratios), 1.0 + ROUNDING))
    if gaps:
        name = f"critical path / lower bound, mean over {len(gaps)} sets"
        rows.append(Row(name, statistics.mean(gaps)))
        rows.append(Row("... the farthest from it", max(gaps)))
    return rows


def main() -> int:
    """Plan, print, and write the results; returns the exit status."""
    parts = ("time", "problems", "quality")
    report = start(
        "planning",
        __doc__,
        only={"nargs": "+", "choices": parts, "default": parts},
        limit={"type": float, "default": 60, "help": "seconds of torchrec's planner for a set"},
    )
    options = report.options
    timed, problems, compared = TIMED, PROBLEMS, compared_jobs()
    if options.quick:
        timed = ()
        problems = tuple(problem for problem in PROBLEMS if problem.job.num_tables < 10)
        compared = compared[:2]
    outcomes, compared_outcomes = [], []
    if "time" in options.only:
        outcomes += plan_timed(report, timed)
    if "problems" in options.only:
        outcomes += plan_timed(report, problems)
    if "quality" in options.only:
        compared_outcomes = plan_compared(report, compared, options.limit)
        report.rows += quality_rows(compared_outcomes)
    for outcome in (*outcomes, *compared_outcomes):
        if isinstance(outcome.ours, str):
            report.note(f"{outcome.job}: {outcome.ours}")
    for some in (outcomes, compared_outcomes):
        report.sections.append(table(HEADER, [outcome.cells() for outcome in some]))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what another process returns is not a class of `__main__`.
    from tests.benchmarks import planning

    sys.exit(planning.main())
