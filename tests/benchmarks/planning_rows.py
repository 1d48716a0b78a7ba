"""Tables of the section about planning: what was seen, beside what was aimed at."""

from collections.abc import Mapping

from tests.benchmarks.page import NONE, table
from tests.benchmarks.performance_rows import Row
from tests.benchmarks.planning_jobs import Timed
from tests.benchmarks.planning_one import Planned
from tests.benchmarks.planning_runs import Measured, Outcome

ROUNDING = 1e-9
"""By so much two sums of the same numbers may differ."""


def summary(measured: Measured) -> list[Row]:
    """Return the lines of the summary."""
    rows = []
    for timed, outcome in measured.timed.items():
        name = f"{timed.job.num_tables:,} tables on {timed.job.num_ranks:,} ranks: seconds to plan"
        seen = None if isinstance(outcome.distrec, str) else outcome.distrec.seconds
        rows.append(Row(name, seen, timed.aim_seconds))
    ratios = [outcome.ratio for outcome in measured.compared if outcome.ratio is not None]
    gaps = [outcome.gap for outcome in measured.compared if outcome.gap is not None]
    if ratios:
        among = f"over {len(ratios)} sets of tables"
        rows.append(
            Row(
                f"critical path / the default planner's, mean {among}",
                sum(ratios) / len(ratios),
                1.0,
            )
        )
        rows.append(Row("... the worst of them", max(ratios), 1.0 + ROUNDING))
    if gaps:
        rows.append(
            Row(f"critical path / lower bound, mean of {len(gaps)} sets", sum(gaps) / len(gaps))
        )
        rows.append(Row("... the farthest from it", max(gaps)))
    return rows


def times_table(outcomes: Mapping[Timed, Outcome]) -> str:
    """Return seconds and memory of the timed jobs, both planners side by side."""
    rows = []
    for outcome in outcomes.values():
        distrec, default, job = outcome.distrec, outcome.default, outcome.job
        rows.append([
            f"{job.kind}, {job.num_tables:,} x {job.num_ranks:,}",
            _seconds(distrec),
            NONE if isinstance(distrec, str) else f"{distrec.peak_bytes / 2**20:,.0f}",
            _seconds(default),
            _number(outcome.ratio),
            _number(outcome.gap),
        ])
    header = ["set, tables x ranks", "seconds", "MiB of the process", "default's seconds", "ratio"]
    return table([*header, "over the lower bound"], rows)


def compared_csv(measured: Measured) -> str:
    """Return a CSV with a line for each set of tables that both planners were given."""
    rows = []
    for outcome in measured.compared:
        job = outcome.job
        rows.append([
            job.kind,
            f"{job.num_tables} x {job.num_ranks}",
            f"{job.memory_gb:g}",
            _milliseconds(outcome.distrec),
            _milliseconds(outcome.default),
            _number(outcome.ratio),
            _number(outcome.gap),
            _seconds(outcome.distrec),
            _seconds(outcome.default),
        ])
    header = ["set", "tables x ranks", "GB per rank", "ours (ms)", "default's (ms)"]
    lines = [[*header, "ratio", "over the lower bound", "ours (s)", "default's (s)"], *rows]
    return "".join(",".join(line) + "\n" for line in lines)


def failures(measured: Measured) -> list[str]:
    """Return what our planner came to no plan for, and why."""
    outcomes: list[Outcome] = [
        *measured.timed.values(),
        *measured.problems.values(),
        *measured.compared,
    ]
    return [
        f"{outcome.job}: {outcome.distrec}"
        for outcome in outcomes
        if isinstance(outcome.distrec, str)
    ]


def _seconds(actual: Planned | str) -> str:
    return _short(actual) if isinstance(actual, str) else f"{actual.seconds:.1f}"


def _milliseconds(actual: Planned | str) -> str:
    return _short(actual) if isinstance(actual, str) else f"{actual.critical_path:.3f}"


def _short(reason: str) -> str:
    """Return a reason that fits into a cell: torchrec's are whole paragraphs."""
    return reason if len(reason) < 40 else "no plan"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"
