"""Ids that steps compute are prefetched in every kind of run, and no number is another one than at
depth 1."""

from typing import Any

import pytest
import torch

from tests.support import computed_runs as runs
from tests.support.computed_runs import LOOKUPS, ONE_RUN, STEPS, Ran
from tests.support.parameters import slow_except
from tests.support.ranks import run_on_warm_ranks

RUNS: dict[str, dict[str, Any]] = {
    "by hand, evaluated": {"manual": True, "evaluates": True},
    "dense layers by fsdp": {
        "strategy": {"dense": "fsdp", "fsdp": {"min_num_parameters": 8}},
        "evaluates": True,
    },
    "compiled": {"compiler": "aot_eager"},
    "compiled, by hand, dense layers by fsdp": {
        "strategy": {"dense": "fsdp", "fsdp": {"min_num_parameters": 8}},
        "compiler": "aot_eager",
        "manual": True,
    },
}


@pytest.mark.parametrize("name", slow_except(["by hand, evaluated"], RUNS))
def test_numbers_are_those_of_depth_1_and_lookups_are_sent_ahead(name: str) -> None:
    per_rank_results: list[tuple[Ran, Ran]] = run_on_warm_ranks(
        runs.run_at_both_depths, 2, RUNS[name]
    )
    for plain, ahead in per_rank_results:
        assert len(plain.losses) == 2 * STEPS
        assert ahead.losses == plain.losses
        assert ahead.state.keys() == plain.state.keys()
        assert all(torch.equal(value, ahead.state[key]) for key, value in plain.state.items())
        # Of an epoch of which the steps are known: all but its first step's.
        assert ahead.ahead["training 0"] == (LOOKUPS * (STEPS - 1), LOOKUPS * STEPS)
        assert plain.outcomes.keys() == ahead.outcomes.keys()
        if RUNS[name].get("evaluates"):
            assert torch.equal(plain.outcomes.pop("predicted"), ahead.outcomes.pop("predicted"))
            assert plain.outcomes == ahead.outcomes
            assert ahead.ahead["validation 0"] == (LOOKUPS * (STEPS - 1), LOOKUPS * STEPS)
            # Three steps are recorded, and two batches drawn before the last of them ends.
            assert ahead.ahead["prediction 0"] == (LOOKUPS * (ONE_RUN - 5), LOOKUPS * ONE_RUN)
            assert ahead.ahead["test 0"][0] >= LOOKUPS * ONE_RUN / 2
    assert per_rank_results[0][0].state
