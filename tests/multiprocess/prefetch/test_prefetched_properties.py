"""Any fit, drawn at random, sees the same batches and trains the same weights at any depth, or ends
in the same error.

DISTREC_PROPERTY_LOOPS is the number of fits for each number of ranks, DISTREC_PROPERTY_SEED where
drawing starts. A fit that is wrong is printed as Python.
"""

import os

import pytest

from tests.support.limits import at_most
from tests.support.parameters import slow_except
from tests.support.prefetched_jobs import LoopJob, jobs_of
from tests.support.prefetched_runs import Seen, differences
from tests.support.ranks import RankFailed, run_on_warm_ranks

LOOPS = int(os.environ.get("DISTREC_PROPERTY_LOOPS", "3"))
SEED = int(os.environ.get("DISTREC_PROPERTY_SEED", "0"))


def _problem_of(job: LoopJob, actual: Seen, expected: Seen) -> str:
    """Return what this rank sees otherwise than at depth 1, "" where nothing is."""
    if not expected.raised and not actual.raised:
        # Where batches end before a limit, it is known of more batches that they are the last.
        expected.diary = [line for line in expected.diary if line[0] in ("training", "validation")]
        actual.diary = [line for line in actual.diary if line[0] in ("training", "validation")]
        return differences(actual, expected)
    if bool(expected.raised) != bool(actual.raised) or (
        job.fails is None and actual.raised != expected.raised
    ):
        return f"raised {actual.raised!r}, not {expected.raised!r}"
    is_in_step = job.fails is not None and job.fails[0] != "transfer hook"
    if actual.trained != expected.trained and is_in_step:
        return f"trained {actual.trained} before it failed, not {expected.trained}"
    return ""


def _compare(job: LoopJob) -> str:
    actual = job.run(job.depth)
    if job.num_ranks == 1 or job.fails is None or job.fails[0] != "transfer hook":
        return _problem_of(job, actual, job.run(1))
    # without prefetching the other ranks end by a closed connection
    words = ("failed at batch", "the user's code failed")
    if not actual.raised or any(part in actual.raised for part in words):
        return ""
    return f"raised {actual.raised!r}"


def test_a_difference_is_noticed() -> None:
    job = LoopJob(3, (2, 2))
    assert _problem_of(job, Seen(diary=[("training", [1])]), Seen(diary=[("training", [2])]))
    assert _problem_of(job, Seen(raised="DataError: a"), Seen(raised="DataError: b"))


@pytest.mark.timeout(at_most(10 * LOOPS))
@pytest.mark.parametrize("num_ranks", slow_except([2], [1, 2, 3]))
def test_any_fit_is_the_same_at_any_depth(num_ranks: int) -> None:
    for job in jobs_of(num_ranks, LOOPS, SEED):
        try:
            problems = run_on_warm_ranks(_compare, num_ranks, job, timeout_seconds=at_most(1))
        except RankFailed as failed:
            problems = [str(failed)]
        assert not any(problems), f"{job!r}: {problems}"
