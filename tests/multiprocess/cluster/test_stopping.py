"""SIGTERM to any rank, at any time: all ranks leave after the same step, with Lightning's
SIGTERMException and 143."""

import pytest

from tests.support.parameters import slow_except
from tests.support.prefetched_faults import signalled
from tests.support.prefetched_runs import Seen
from tests.support.ranks import run_on_ranks

WHO = {
    "the first": {0: 0.0},
    "the last": {1: 0.0},
    "all, one a second later": {0: 1.0, 1: 0.0},
}


def _signalled(model: str, depth: int, in_validation: bool) -> dict[str, Seen]:
    step = 4 if in_validation else 5
    return {
        case: signalled(depth, model, ranks, step, in_validation) for case, ranks in WHO.items()
    }


@pytest.mark.parametrize(
    ("model", "depth", "in_validation"),
    slow_except(
        [("tables", 3, False), ("tables", 3, True)],
        [
            ("tables", 3, False),
            ("tables", 3, True),
            ("no tables", 1, False),
            ("dataloader_iter", 3, False),
            ("dataloader_iter", 1, True),
        ],
    ),
)
def test_all_ranks_stop_after_the_same_step(model: str, depth: int, in_validation: bool) -> None:
    per_rank_results = run_on_ranks(_signalled, 2, model, depth, in_validation)
    for case in WHO:
        first, other = (results[case] for results in per_rank_results)
        assert first.raised == other.raised == "SIGTERMException: 143", case
        assert [line[0] for line in first.of("exception")] == [
            line[0] for line in other.of("exception")
        ], case
        assert first.of("exception"), case
        assert first.returned == other.returned, case
        if in_validation:
            assert first.returned == 4, case
            assert len(first.of("validation")) == len(other.of("validation")) < 4, case
        else:
            assert 5 <= first.returned <= 8, case
