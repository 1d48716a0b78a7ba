"""Lightning's loops over batches that are fetched ahead: every batch, number and hook as with
prefetch={'depth': 1}."""

from itertools import product
from typing import Any

import pytest

from tests.support import prefetched_faults as faults
from tests.support.parameters import slow_except
from tests.support.prefetched_runs import Seen, differences
from tests.support.prefetched_scenarios import SCENARIOS, UNEVEN
from tests.support.ranks import run_on_ranks, run_on_warm_ranks

AS_DEPTH_1 = [name for name in SCENARIOS if name != "saved unsized"]
RAISES = [name for name in UNEVEN if "error" in name]
STOPS = [name for name in UNEVEN if "error" not in name]
RARE = {
    "one epoch",
    "one batch",
    "two batches",
    "one unsized batch",
    "limit_train_batches",
    "limit_val_batches",
}
RARE |= {
    "max_steps",
    "val_check_interval int",
    "val_check_interval float",
    "check_val_every_n_epoch",
    "should_stop",
}
RARE |= {
    "overfit_batches",
    "fast_dev_run",
    "skips some",
    "batch size 1",
    "profiler",
    "one table lookup less",
}
RARE |= {"min_size", "max_size_cycle", "saved endless sized", "early stopping"}
RARE |= {
    f"{kind} {mode} (1, 4, 2) (2, 1, 3)"
    for kind in ("sized", "unsized")
    for mode in ("stop", "error")
}
RARE |= {
    f"{kind} {mode} (3, 3) (0, 2)" for kind in ("sized", "unsized") for mode in ("stop", "error")
}
RARE |= {
    "sized stop (6, 4, 5) (2, 2)",
    "unsized stop (4, 4) (3, 1, 2)",
    "combined min_size",
    "combined max_size",
}
RARE |= {"sized stop (4, 4) (3, 1, 2)", "sized error (4, 4) (3, 1, 2)"}
RARE |= {
    "sized error (6, 4, 5) (2, 2)",
    "unsized error (4, 4) (3, 1, 2)",
    "sized error (4, 0) (2, 2)",
}
RARE |= {
    "limit of unsized",
    "max_steps of unsized",
    "should_stop unsized",
    "the same, unsized",
    "reloaded",
}
RARE |= {
    "val_check_interval over epochs",
    "min_size unsized",
    "max_size_cycle unsized",
    "saved endless",
}
RARE |= {"unsized stop (4, 0) (2, 2)", "unsized error (4, 0) (2, 2)"}
"""Those that are near others."""


def _runs(names: list[str], depths: tuple[int, ...]) -> dict[str, dict[int, Seen]]:
    scenarios = SCENARIOS | UNEVEN
    return {name: {depth: scenarios[name](depth) for depth in depths} for name in names}


def _parts(names: list[str], size: int) -> list[Any]:
    """Return parameters of so many names each, the rare ones apart."""
    usual, rare = (
        [name for name in names if (name in RARE) is is_rare] for is_rare in (False, True)
    )
    usual_parts, rare_parts = (
        [some[start : start + size] for start in range(0, len(some), size)]
        for some in (usual, rare)
    )
    return slow_except(usual_parts, usual_parts + rare_parts)


def assert_equal_to_depth_1(results: list[dict[str, dict[int, Seen]]]) -> None:
    """Compare all runs on all ranks."""
    assert results
    for rank, runs in enumerate(results):
        for name, depth_results in runs.items():
            for depth, seen in depth_results.items():
                assert not (problem := differences(seen, depth_results[1])), (
                    f"{name}, rank {rank}, depth {depth}: {problem}"
                )


@pytest.mark.parametrize("names", _parts(AS_DEPTH_1, 5), ids=lambda names: names[0])
def test_loops_see_what_they_see_without_prefetching(names: list[str]) -> None:
    assert_equal_to_depth_1(run_on_warm_ranks(_runs, 2, names, (1, 3)))


@pytest.mark.parametrize("depth", slow_except([], [2, 4]))
def test_any_depth_sees_the_same_on_three_ranks(depth: int) -> None:
    names = [
        "val_check_interval unsized",
        "on_train_batch_start returns -1",
        "max_size_cycle unsized",
        "by hand",
    ]
    assert_equal_to_depth_1(run_on_warm_ranks(_runs, 3, names, (1, depth)))


def test_ids_did_travel_ahead() -> None:
    for runs in run_on_warm_ranks(
        _runs, 2, ["three epochs", "dataloader_iter", "several val loaders"], (1, 2, 3)
    ):
        for depth in (2, 3):
            # Two lookups in each of twelve steps, but for the first one and those that begin an
            # epoch.
            assert runs["three epochs"][depth].ahead["training 0"] == 18
            assert runs["several val loaders"][depth].ahead["validation 3"] >= 2 * 2 * 2
            assert "training 0" not in runs["dataloader_iter"][depth].ahead
        assert runs["three epochs"][1].ahead == {}


@pytest.mark.slow
@pytest.mark.parametrize("names", _parts(STOPS, 5), ids=lambda names: names[0])
def test_uneven_inputs_end_where_they_end_without_prefetching(names: list[str]) -> None:
    # Where the batches end before the limit, more is known of the last one: that it is the last.
    results = run_on_warm_ranks(_runs, 3, names, (1, 3))
    for runs in results:
        for name, depth_results in runs.items():
            assert depth_results[3].trained == depth_results[1].trained, name
            assert depth_results[3].of("validation") == depth_results[1].of("validation"), name
            assert depth_results[3].raised == depth_results[1].raised, name


@pytest.mark.parametrize("names", _parts(RAISES, 5), ids=lambda names: names[0])
def test_uneven_inputs_raise_what_they_raise_without_prefetching(names: list[str]) -> None:
    for runs in run_on_warm_ranks(_runs, 3, names, (1, 3)):
        for name, depth_results in runs.items():
            assert depth_results[1].raised.startswith("DataError"), name
            assert depth_results[3].raised == depth_results[1].raised, name
            # Lightning asks a batch earlier whether there is one: no batch is lost here that was
            # trained there.
            assert (
                depth_results[3].trained[: len(depth_results[1].trained)]
                == depth_results[1].trained
            ), name


def test_a_checkpoint_holds_the_state_of_loaders_after_the_batch_that_was_trained() -> None:
    for runs in run_on_warm_ranks(_runs, 2, ["saved unsized", "saved"], (3,)):
        for name in ("saved unsized", "saved"):
            saved = runs[name][3].of("saved")
            assert [(step, states) for step, states in saved] == [
                (2, [{"position": 2}]),
                (4, [{"position": 4}]),
                (6, [{"position": 1}]),
                (8, [{"position": 3}]),
                (10, [{"position": 5}]),
            ]


def _run(function: str, arguments: tuple[Any, ...], depth: int) -> Seen:
    return getattr(faults, function)(depth, *arguments)


@pytest.mark.parametrize(
    ("kind", "depth"),
    slow_except([("sized", 3), ("unsized", 2)], product(["sized", "unsized"], [2, 3])),
)
def test_a_loader_that_fails_on_one_rank_is_named_on_the_others(kind: str, depth: int) -> None:
    first, failed = run_on_ranks(_run, 2, "loader_fails", (kind,), depth)
    assert first.raised == (
        "DataError: the dataloader of rank 1 failed at batch 3: OSError: the disk went away"
    )
    assert failed.raised == "OSError: the disk went away"
    assert len(first.trained) == len(failed.trained) == 3


@pytest.mark.parametrize("depth", slow_except([3], [2, 3]))
def test_a_transfer_hook_that_fails_on_one_rank_is_named_on_the_others(depth: int) -> None:
    first, failed = run_on_ranks(_run, 2, "fails", ("transfer hook", 3, (1,)), depth)
    assert first.raised == (
        "DataError: the dataloader of rank 1 failed at batch 3: ValueError: the user's code failed"
    )
    assert failed.raised == "ValueError: the user's code failed"
    assert len(first.trained) == len(failed.trained) == 3


ONE_OF_SEVERAL = {
    "validation_hook_fails": (1, "ValueError: the user's code failed"),
    "validation_loader_fails": (3, "OSError: the disk went away"),
}


@pytest.mark.parametrize("depth", slow_except([3], [2, 3, 4]))
@pytest.mark.parametrize("function", ONE_OF_SEVERAL)
def test_one_of_several_loaders_that_fails_is_named_on_the_other_ranks(
    function: str, depth: int
) -> None:
    first, failed = run_on_ranks(_run, 2, function, (), depth)
    count, message = ONE_OF_SEVERAL[function]
    assert first.raised == f"DataError: the dataloader of rank 1 failed at batch {count}: {message}"
    assert failed.raised == message


def _id_out_of_range() -> dict[int, Seen]:
    return {depth: faults.id_out_of_range(depth) for depth in (1, 2, 3, 4)}


def test_an_id_out_of_range_is_reported_on_every_rank_after_the_steps_before_it() -> None:
    for results in run_on_ranks(_id_out_of_range, 2):
        for depth, seen in results.items():
            assert seen.raised.startswith("IdsError: "), depth
            assert seen.raised == results[1].raised, depth
            assert len(seen.trained) == 3, depth
            assert not differences(seen, results[1]), depth


PLACES = ["before lookups", "after lookups", "batch start", "batch end", "validation"]


@pytest.mark.parametrize(
    ("place", "batch_number"),
    slow_except(
        [("before lookups", 0), ("batch end", 1), ("validation", 1)], product(PLACES, [0, 1, 3])
    ),
)
def test_an_exception_of_the_user_on_one_rank_ends_all_ranks(place: str, batch_number: int) -> None:
    batch_number = 500 + min(batch_number, 2) if place == "validation" else batch_number
    first, failed = run_on_ranks(_run, 2, "fails", (place, batch_number, (1,)), 3)
    assert failed.raised == "ValueError: the user's code failed"
    assert first.raised  # a connection that was closed, or RankError


def _all_fail() -> dict[str, dict[int, Seen]]:
    cases = [(place, 502 if place == "validation" else 2) for place in PLACES] + [
        ("before lookups", 0)
    ]
    return {
        f"{place} {batch_number}": {
            depth: faults.fails(depth, place, batch_number, (0, 1)) for depth in (1, 3)
        }
        for place, batch_number in cases
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
