"""The benchmark of plans at tiny size: every plan gets its turns, and is the one that training
follows."""

from pathlib import Path

import pytest

from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.benchmarks.performance_contenders import Turn
from tests.benchmarks.performance_rounds import join_ranks
from tests.benchmarks.plan_quality_plans import Space, default_bandwidths
from tests.benchmarks.plan_quality_text import PLANNERS
from tests.benchmarks.plan_quality_turns import (
    OURS_DEFAULT,
    TORCHRECS_DEFAULT,
    Job,
    Measured,
    take_turns,
)
from tests.support.ranks import run_on_ranks

JOB = Job(
    NodeLayout.from_node_sizes(2), num_plans=9, rounds=1, turn=Turn(first=1, counted=2, last=1)
)


def measure(folder: str) -> Measured:
    join_ranks()
    return take_turns(JOB, Path(folder))


@pytest.mark.slow
def test_every_plan_takes_its_turns_and_planners_plans_are_among_them(tmp_path: Path) -> None:
    actual: Measured = run_on_ranks(measure, 2, str(tmp_path))[0]
    assert len(actual.plans) == JOB.num_plans
    assert all(
        [len(steps) for steps in tried.rounds] == [JOB.turn.counted]
        for tried in actual.plans.values()
    )
    assert set(PLANNERS) <= set(actual.equal_plans)
    assert set(actual.equal_plans.values()) <= set(actual.plans)
    assert actual.bandwidths.intra_node.origin.startswith("measured")
    # What a fit planned by itself is what the planner says of the same tables outside of any fit.
    space = Space(JOB.places)
    torchrecs = actual.plans[actual.equal_plans[TORCHRECS_DEFAULT]]
    distrec = actual.plans[actual.equal_plans[OURS_DEFAULT]]
    assert space.key(torchrecs.plan) == space.key(space.torchrecs(default_bandwidths()))
    assert distrec.estimate_default <= torchrecs.estimate_default * (1 + 1e-9)
    assert distrec.estimate_default == space.estimate(distrec.plan, default_bandwidths())
