"""Everything that the benchmark of planning measures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.planning_jobs import SHAPES, TIMED, Job, Timed, compared_jobs
from tests.benchmarks.planning_one import Planned, run_one
from tests.benchmarks.planning_problems import PROBLEMS

PATIENCE = 10
"""How many times the aim our planner may take before it is ended."""


@dataclass(frozen=True)
class Outcome:
    """What both planners came to; a text is why one came to nothing."""

    job: Job
    distrec: Planned | str
    default: Planned | str

    @property
    def ratio(self) -> float | None:
        """Critical path of our plan over that of the default planner's."""
        if isinstance(self.distrec, str) or isinstance(self.default, str):
            return None
        return self.distrec.critical_path / self.default.critical_path

    @property
    def gap(self) -> float | None:
        """Critical path of our plan over the lower bound of any."""
        if isinstance(self.distrec, str) or not self.distrec.lower_bound:
            return None
        return self.distrec.critical_path / self.distrec.lower_bound


@dataclass
class Measured:
    """What there is to report."""

    timed: dict[Timed, Outcome] = field(default_factory=dict)
    problems: dict[Timed, Outcome] = field(default_factory=dict)
    compared: list[Outcome] = field(default_factory=list)
    limit_seconds: float = 0.0
    """Of each call of torchrec's planner in comparisons."""


def measure(
    parts: Sequence[str],
    limit_seconds: float,
    quick: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Run both planners, one call at a time. parts: "time", "problems", "quality". quick: only
    small jobs."""
    measured = Measured(limit_seconds=limit_seconds)
    for timed in TIMED if "time" in parts else ():
        if quick and timed.job.num_tables > 100:
            continue
        distrec = run_one("ours", timed.job, PATIENCE * timed.aim_seconds)
        limit = 0 if quick else timed.default_limit_seconds
        default = run_one("default", timed.job, limit) if limit else "not tried"
        measured.timed[timed] = Outcome(timed.job, distrec, default)
        tell(_said(measured.timed[timed]))
    for problem in PROBLEMS if "problems" in parts else ():
        if quick and problem.job.num_tables > 10:
            continue
        distrec = run_one("ours", problem.job, PATIENCE * problem.aim_seconds)
        limit = problem.default_limit_seconds
        default = run_one("default", problem.job, limit) if limit else "not tried"
        measured.problems[problem] = Outcome(problem.job, distrec, default)
        tell(_said(measured.problems[problem]))
    quality_values = compared_jobs() if "quality" in parts else []
    for job in quality_values[: len(quality_values) // len(SHAPES)] if quick else quality_values:
        outcome = Outcome(
            job, run_one("ours", job, 10 * limit_seconds), run_one("default", job, limit_seconds)
        )
        measured.compared.append(outcome)
        tell(_said(outcome))
    return measured


def _said(outcome: Outcome) -> str:
    distrec, default = (
        first if isinstance(first, str) else f"{first.seconds:.1f} s, {first.critical_path:.3f} ms"
        for first in (outcome.distrec, outcome.default)
    )
    ratio = "" if outcome.ratio is None else f"; ratio {outcome.ratio:.4f}"
    return f"{outcome.job}: ours {distrec}; default {default}{ratio}"
