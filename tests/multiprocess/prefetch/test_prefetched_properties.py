"""Any fit, drawn at random, sees the same batches and trains the same weights at any depth, or ends
in the same error.

DISTREC_PROPERTY_LOOPS is the number of fits for each number of ranks, DISTREC_PROPERTY_SEED where
drawing starts. A fit that is wrong is printed as Python; `check([LoopJob(...)])` runs it again,
alone.
"""

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.limits import at_most
from tests.support.parameters import slow_except
from tests.support.prefetched_jobs import LoopJob, jobs_of
from tests.support.prefetched_runs import Seen, differences
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

LOOPS = int(os.environ.get("DISTREC_PROPERTY_LOOPS", "5"))
SEED = int(os.environ.get("DISTREC_PROPERTY_SEED", "0"))
AT_ONCE = 8
"""Fits that run one after the other in the same ranks."""


def _problem_of(job: LoopJob, actual: Seen, expected: Seen) -> str:
    """Return what this rank sees otherwise than at depth 1, "" where nothing is."""
    if not expected.raised and not actual.raised:
        # Where batches end before a limit, it is known of more batches that they are the last.
        expected.diary = [line for line in expected.diary if line[0] in ("training", "validation")]
        actual.diary = [line for line in actual.diary if line[0] in ("training", "validation")]
        return differences(actual, expected)
    if bool(expected.raised) != bool(actual.raised):
        return f"raised {actual.raised!r}, not {expected.raised!r}"
    if job.fails is None and actual.raised != expected.raised:
        return f"raised {actual.raised!r}, not {expected.raised!r}"
    if (
        actual.trained != expected.trained
        and job.fails is not None
        and job.fails[0] != "transfer hook"
    ):
        return f"trained {actual.trained} before it failed, not {expected.trained}"
    return ""


def _compare_all(jobs: list[LoopJob], folder: str) -> None:
    """Run one job after the other; each rank leaves what is wrong in the folder, for what comes
    after may hang."""
    rank, num_ranks = rank_and_num_ranks()
    for index, job in enumerate(jobs):
        ends_ranks = num_ranks > 1 and job.fails is not None and job.fails[0] == "transfer hook"
        actual = job.run(job.depth)
        if ends_ranks:  # without prefetching the other ranks end by a closed connection
            is_expected = (
                "failed at batch" in actual.raised
                or "the user's code failed" in actual.raised
                or not actual.raised
            )
            problem = "" if is_expected else f"raised {actual.raised!r}"
        else:
            problem = _problem_of(job, actual, job.run(1))
        Path(f"{folder}/{index}.{rank}").write_text(problem)


def check(jobs: list[LoopJob]) -> None:
    """Run the jobs. Raises AssertionError: in one of them the depth makes a difference, or a rank
    failed or hung."""
    problems: list[str] = []
    done = 0
    while done < len(jobs):
        todo = jobs[done:][:AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            failed = ""
            try:
                run_on_ranks(
                    _compare_all,
                    todo[0].num_ranks,
                    todo,
                    folder,
                    timeout_seconds=at_most(len(todo)),
                )
            except RankFailed as error:
                failed = str(error)
            for index, job in enumerate(todo):
                paths = [Path(f"{folder}/{index}.{rank}") for rank in range(job.num_ranks)]
                if not all(path.exists() for path in paths):
                    problems.append(f"{job!r}\n{failed}")
                    done += 1
                    break
                done += 1
                messages = {
                    rank: path.read_text() for rank, path in enumerate(paths) if path.read_text()
                }
                problems += [f"{job!r}\nrank {rank}: {text}" for rank, text in messages.items()]
    if problems:
        raise AssertionError(
            f"{len(problems)} problems in {len(jobs)} fits:\n\n" + "\n\n".join(problems)
        )


def test_a_difference_and_a_rank_that_fails_are_reported() -> None:
    right = LoopJob(3, (2, 2))
    with pytest.raises(
        AssertionError,
        match=r"1 problems in 2 fits:\n\nLoopJob\(depth=3, train=\(2, 2\), model='no",
    ):
        check([right, LoopJob(3, (2, 2), model="no such model")])
    assert _problem_of(right, Seen(diary=[("training", [1])]), Seen(diary=[("training", [2])]))
    assert _problem_of(right, Seen(raised="DataError: a"), Seen(raised="DataError: b"))


@pytest.mark.timeout(at_most(10 * LOOPS))
@pytest.mark.parametrize("num_ranks", slow_except([2], [1, 2, 3]))
def test_any_fit_is_the_same_at_any_depth(num_ranks: int) -> None:
    check(jobs_of(num_ranks, LOOPS, SEED))
