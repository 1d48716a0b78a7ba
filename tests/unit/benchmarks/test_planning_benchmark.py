"""The benchmark of planning at small size: what it compares, and what it says of what came to
nothing."""

import pytest

from tests.benchmarks.checkpointing_text import with_section
from tests.benchmarks.performance_text import GPU
from tests.benchmarks.planning_jobs import TIMED, Job, compared_jobs
from tests.benchmarks.planning_one import Planned, plan_here, run_one
from tests.benchmarks.planning_rows import compared_csv, failures, summary, times_table
from tests.benchmarks.planning_runs import Measured, Outcome
from tests.benchmarks.planning_text import BEGIN, END, section

SMALL = Job(kind="uniform", num_tables=4, num_ranks=2, ranks_on_node=2, memory_gb=16)


def test_another_process_comes_to_the_plan_that_this_one_comes_to() -> None:
    remote = run_one("ours", SMALL, 60)
    local = plan_here("ours", SMALL)
    assert isinstance(remote, Planned)
    assert (remote.critical_path, remote.facts) == (local.critical_path, local.facts)
    default = plan_here("default", SMALL)
    assert local.lower_bound is not None
    assert local.lower_bound <= local.critical_path * (1 + 1e-9)
    assert local.critical_path <= default.critical_path * (1 + 1e-9)


@pytest.mark.slow
def test_a_planner_that_takes_too_long_or_fails_is_reported_and_nothing_waits_for_it() -> None:
    large = Job(kind="uniform", num_tables=300, num_ranks=64, memory_gb=16)
    assert run_one("default", large, 1) == "not ended after 1 s"
    full = Job(kind="uniform", num_tables=300, num_ranks=2, ranks_on_node=2, memory_gb=1)
    assert str(run_one("ours", full, 60)).startswith("InfeasiblePlanError: the tables do not fit")


def test_twenty_sets_are_compared_of_every_kind_and_for_2_to_64_ranks() -> None:
    jobs = compared_jobs()
    assert len(set(jobs)) == 20
    assert {job.num_ranks for job in jobs} == {2, 4, 8, 16, 64}
    assert {job.kind for job in jobs} == {"uniform", "zipf", "giant", "tiny"}


def test_worse_plans_and_missed_aims_are_bold_and_failures_are_listed() -> None:
    good, bad = Planned(4.0, 9.0, 8.0), Planned(6.0, 11.0, 10.0)
    default = Planned(100.0, 10.0)
    measured = Measured(limit_seconds=60)
    measured.timed = {
        TIMED[0]: Outcome(TIMED[0].job, bad, "not tried"),
        TIMED[1]: Outcome(TIMED[1].job, good, default),
    }
    measured.compared = [
        Outcome(SMALL, good, default),
        Outcome(SMALL, bad, default),
        Outcome(SMALL, good, "late"),
    ]
    rows = {row.name: row for row in summary(measured)}
    assert {name for name, row in rows.items() if row.missed} == {
        "100 tables on 64 ranks: seconds to plan",
        "... the worst of them",
    }
    assert rows[
        "critical path / the default planner's, mean over 2 sets of tables"
    ].value == pytest.approx(1.0)
    assert "1.100" in compared_csv(measured)
    assert "not tried" in times_table(measured.timed)
    assert failures(measured) == []
    measured.compared.append(Outcome(SMALL, "PlanError: no", default))
    assert failures(measured) == ["4 tables (uniform) on 2 ranks: PlanError: no"]


def test_the_section_comes_before_the_one_about_gpus_and_replaces_the_one_that_is_there() -> None:
    actual = section(
        "summary", "times", "problems", [], machine="2 cores", limit_seconds=60, load=0.5
    )
    page = with_section(f"# How fast\n\nwords\n\n{GPU}\n", actual, BEGIN, END)
    assert page.index("words") < page.index(BEGIN) < page.index(END) < page.index("## On a GPU")
    assert with_section(page, actual.replace("times", "other"), BEGIN, END) == page.replace(
        "times", "other"
    )
