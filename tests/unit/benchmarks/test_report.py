"""What every benchmark reports, and what they compare with, where it is plain functions."""

import sys

import pytest
import torch

from lightning_distrec.sharding.planning.plan_file import load_plan, plan_text, save_plan
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.benchmarks import checkpointing_model as model
from tests.benchmarks.plan_quality import rank_correlation
from tests.benchmarks.plan_quality_plans import (
    key_of,
    plans_of_one_type,
    sampled_plans,
    tables_on,
)
from tests.benchmarks.planning_jobs import Job
from tests.benchmarks.planning_one import Planned, plan_here, run_one
from tests.benchmarks.report import CannotMeasure, Row, ratio_row, start
from tests.support.planned_tables import default_bandwidths, default_plan


def fail(error: Exception) -> None:
    raise error


def test_a_report_shows_missed_aims_and_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = start("benchmark", "A benchmark.")
    assert report.attempt("good", len, "three") == 5
    assert report.attempt("impossible", fail, CannotMeasure("no link")) is None
    assert report.finish() == 0
    assert report.attempt("bad", fail, AssertionError("not equal")) is None
    report.rows += [
        ratio_row("slow", [1.0, 4.0, 30.0], [2.0, 2.0, 3.0], 1.1),
        ratio_row("not run", [], [1.0], 1.1),
        Row("fast", 20.0, 12.0, at_least=True),
    ]
    assert [row.missed for row in report.rows] == [True, False, False]
    text = report.text()
    assert "| slow | **2.000** | at most 1.100 | 0.500 to 10.0 |" in text
    assert "| not run | – | at most 1.100 | – |" in text
    assert "| fast | 20.0 | at least 12.0 | – |" in text
    assert "- Not measured: impossible: no link." in text
    assert "- **Went wrong: bad: not equal**" in text
    assert report.finish() == 1


def test_a_row_that_is_not_as_it_was_saved_is_found() -> None:
    rows, part = torch.empty(5000, 64), torch.empty(3000, 16)
    model._known(rows, "t_f0.weight", 1, 0, 0)
    model._known(part, "state_dict/net.t_f0.weight", 1, 2000, 32)
    assert torch.equal(part, rows[2000:, 32:48]), "the cut makes no difference"
    model._must_be_known(rows, "t_f0.weight", 1, 0, 0, "the table")
    rows[4999, 63] += 1e-6
    with pytest.raises(AssertionError, match=r"the table: 't_f0.weight' is not what was saved"):
        model._must_be_known(rows, "t_f0.weight", 1, 0, 0, "the table")


def test_another_process_comes_to_the_plan_that_this_one_comes_to() -> None:
    small = Job(kind="uniform", num_tables=4, num_ranks=2, ranks_on_node=2, memory_gb=16)
    remote, local = run_one("ours", small, 60), plan_here("ours", small)
    assert isinstance(remote, Planned)
    assert (remote.critical_path, remote.facts) == (local.critical_path, local.facts)
    default = plan_here("default", small)
    assert local.lower_bound is not None
    assert local.lower_bound <= local.critical_path * (1 + 1e-9)
    assert local.critical_path <= default.critical_path * (1 + 1e-9)


def test_a_sample_holds_the_named_plans_and_unlike_others_that_files_can_hold(tmp_path) -> None:  # type: ignore[no-untyped-def]
    layout = NodeLayout.from_node_sizes(2, 2)
    inputs = tables_on(layout, default_bandwidths())
    named = {"torchrec's": default_plan(inputs)} | plans_of_one_type(inputs)
    plans = sampled_plans(layout, named, 20, seed=0)
    assert len(plans) == 20
    assert list(plans)[: len(named)] == list(named)
    assert plans == sampled_plans(layout, named, 20, seed=0)
    others = [plan for name, plan in plans.items() if name not in named]
    assert len({key_of(plan) for plan in others}) == len(others)
    for plan in plans.values():
        save_plan(tmp_path / "plan.json", plan)
        assert plan_text(load_plan(tmp_path / "plan.json")) == plan_text(plan)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ranks less their mean are -1.5, 0, 0, 1.5 and -1.5, -0.5, 1.5, 0.5: products add up to 3,
    # squares to 4.5 and 5.
    assert rank_correlation([1, 2, 2, 3], [5, 6, 9, 8]) == pytest.approx(3 / 22.5**0.5)
