"""Lightning's loops over batches that are fetched ahead: every batch, number and hook as with
prefetch={'depth': 1}."""

from typing import Any

import pytest

from tests.support import prefetched_faults as faults
from tests.support.parameters import slow_except
from tests.support.prefetched_runs import Seen, differences
from tests.support.prefetched_scenarios import SCENARIOS, UNEVEN
from tests.support.ranks import run_on_ranks, run_on_warm_ranks

QUICK = [
    "three epochs",
    "fit, validate, test, predict",
    "on_train_batch_start returns -1",
    "by hand",
    "dataloader_iter",
    "transfers",
    "predict",
    "shuffled",
    "saved",
]
# Without look-ahead, Lightning saves the state of an unsized loader a batch too late.
SLOW = [name for name in SCENARIOS if name not in (*QUICK, "saved unsized")]
Runs = dict[str, dict[int, Seen]]


def _runs(names: list[str], depths: tuple[int, ...]) -> Runs:
    scenarios = SCENARIOS | UNEVEN
    return {name: {depth: scenarios[name](depth) for depth in depths} for name in names}


def assert_equal_to_depth_1(results: list[Runs]) -> None:
    """Compare all runs on all ranks."""
    assert results
    for rank, runs in enumerate(results):
        for name, depth_results in runs.items():
            for depth, seen in depth_results.items():
                problem = differences(seen, depth_results[1])
                assert not problem, f"{name}, rank {rank}, depth {depth}: {problem}"


@pytest.mark.parametrize("names", slow_except([QUICK], [QUICK, SLOW]), ids=["quick", "slow"])
def test_loops_see_what_they_see_without_prefetching(names: list[str]) -> None:
    results: list[Runs] = run_on_warm_ranks(_runs, 2, names, (1, 3))
    assert_equal_to_depth_1(results)
    if names is QUICK:
        for runs in results:
            # Two lookups in each of twelve steps, but for those that begin an epoch.
            assert runs["three epochs"][3].ahead["training 0"] == 18
            assert "training 0" not in runs["dataloader_iter"][3].ahead
            # Two in each step but the first of a loader's: of loaders of 3, 2, 1 and 4 batches.
            ahead = runs["fit, validate, test, predict"][3].ahead
            assert [ahead[f"prediction {i}"] for i in range(4)] == [4, 2, 0, 6]
            assert (ahead["test 0"], ahead["validation 3"]) == (4, 6)
            assert runs["three epochs"][1].ahead == {}


def test_loaders_that_end_at_other_batches_end_epochs_as_without_prefetching() -> None:
    for runs in run_on_warm_ranks(_runs, 2, list(UNEVEN), (1, 3)):
        for name, results in runs.items():
            plain, ahead = results[1], results[3]
            assert plain.raised.startswith("DataError") == name.endswith("error"), name
            assert ahead.raised == plain.raised, name
            # Lightning asks a batch earlier whether there is one: none is lost that was trained.
            assert ahead.trained[: len(plain.trained)] == plain.trained, name
            assert plain.raised or len(ahead.trained) == len(plain.trained), name


def test_a_checkpoint_holds_the_state_of_loaders_after_the_batch_that_was_trained() -> None:
    for runs in run_on_warm_ranks(_runs, 2, ["saved unsized", "saved"], (3,)):
        for results in runs.values():
            saved = [(step, state["position"]) for step, [state] in results[3].of("saved")]
            assert saved == [(2, 2), (4, 4), (6, 1), (8, 3), (10, 5)]


def _run(function: str, arguments: tuple[Any, ...], depth: int) -> Seen:
    return getattr(faults, function)(depth, *arguments)


DISK, CODE = "OSError: the disk went away", "ValueError: the user's code failed"
FAILING: dict[str, tuple[str, tuple[Any, ...], int, str, int]] = {
    "a loader": ("loader_fails", ("sized",), 3, DISK, 3),
    "an unsized loader": ("loader_fails", ("unsized",), 2, DISK, 3),
    "a transfer hook": ("fails", ("transfer hook", 3, (1,)), 3, CODE, 3),
    "one of several loaders": ("validation_loader_fails", (), 3, DISK, 3),
    "the hook of one of several": ("validation_hook_fails", (), 3, CODE, 1),
}
"""What fails on rank 1: function, arguments, depth; with what error, at which batch."""


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_on_the_way_of_a_batch_is_named_on_the_other_ranks(name: str) -> None:
    function, arguments, depth, error, batch = FAILING[name]
    first, failed = run_on_ranks(_run, 2, function, arguments, depth)
    expected = f"DataError: the dataloader of rank 1 failed at batch {batch}: {error}"
    assert (first.raised, failed.raised) == (expected, error)
    num_trained = 0 if function.startswith("validation") else batch
    assert len(first.trained) == len(failed.trained) == num_trained


@pytest.mark.parametrize(
    ("place", "batch_number"), [("before lookups", 0), ("batch end", 1), ("validation", 501)]
)
def test_an_exception_of_the_user_on_one_rank_ends_all_ranks(place: str, batch_number: int) -> None:
    first, failed = run_on_ranks(_run, 2, "fails", (place, batch_number, (1,)), 3)
    assert failed.raised == CODE
    assert first.raised  # a connection that was closed, or RankError


def _all_fail() -> Runs:
    places = [("before lookups", 0), ("after lookups", 2), ("batch end", 2), ("validation", 502)]
    return {
        place: {depth: faults.fails(depth, place, number, (0, 1)) for depth in (1, 3)}
        for place, number in places
    }


@pytest.mark.slow
def test_fitting_again_after_an_exception_on_all_ranks_is_as_without_prefetching() -> None:
    assert_equal_to_depth_1(run_on_ranks(_all_fail, 2))


def _interrupted() -> str:
    try:
        faults.fails(3, "before lookups", 2, (0, 1), KeyboardInterrupt)
    except SystemExit as end:
        return f"exit {end.code}"
    return "went on"


def test_a_keyboard_interrupt_on_all_ranks_ends_them() -> None:
    assert run_on_ranks(_interrupted, 2) == ["exit 1", "exit 1"]
