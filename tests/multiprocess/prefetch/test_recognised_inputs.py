"""However the inputs of a lookup come out of a batch, ids that travel ahead of their step change no
number.

Each fit is compared, bit for bit, with the same one at prefetch={'depth': 1}, where tables are
looked up as they are called.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support import recognised_models as models
from tests.support.ranks import run_each_on_ranks, run_on_ranks
from tests.support.recognised_models import (
    AHEAD,
    CHANGING,
    LACKING,
    MADE,
    MISSING,
    REORDERED,
    SOME,
    STEPS,
    UNCOUNTED,
)


def _agree(names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank found in each case; every one is as it is without look-ahead."""
    names = list(names)
    per_rank_results = run_each_on_ranks({name: (models.compare, name) for name in names}, 2)
    results = {name: [rank_result[name] for rank_result in per_rank_results] for name in names}
    for name, case_results in results.items():
        for result in case_results:
            assert (result["different"], result["error"]) == ([], ""), name
            assert len(result["losses"]) >= STEPS, name
        moved = {key: far for key, far in case_results[0]["moved"].items() if "score" not in key}
        assert max(moved.values()) > 1e-4, name
    return results


def _assert_ahead(results: dict[str, list[dict[str, Any]]]) -> None:
    """All lookups but those of the first step were sent ahead; nothing was said."""
    for name, case_results in results.items():
        for result in case_results:
            lookups, ahead = result["counts"]["training 0"]
            lookups_per_step, remainder = divmod(lookups, len(result["losses"]))
            assert remainder == 0, name
            assert ahead == lookups - lookups_per_step, (name, lookups, ahead)
            assert result["said"] == [], name


def test_parts_of_any_batch_travel_ahead() -> None:
    _assert_ahead(_agree(AHEAD))


def test_rows_that_change_after_the_step_began_are_looked_up_again() -> None:
    results = _agree(CHANGING)
    for result in results.pop("alternates"):
        assert result["counts"]["training 0"] == (3 * STEPS, 3 * (STEPS - 1))
    _assert_ahead(results)


def test_hooks_make_each_batch_once_and_sparse_inputs_is_called_once_for_it() -> None:
    results = _agree(MADE)
    _assert_ahead(results)
    expected = {"before": STEPS, "transfer": STEPS, "after": STEPS}
    for name in ("hooks of the module", "hooks of the datamodule"):
        for result in results[name]:
            assert result["calls"] == result["plain calls"] == expected
    for result in results["declared"]:
        assert result["declared"] == (STEPS, True)


def test_what_is_left_out_or_computed_in_the_step_is_looked_up_there() -> None:
    results = _agree(SOME)
    for name, (case, count) in SOME.items():
        first, other = results[name]
        assert first["counts"]["training 0"] == other["counts"]["training 0"] == count, name
        assert other["said"] == []
        if "prefetch" not in case.strategy:
            assert first["said"] == [], name
            continue
        [message] = first["said"]
        assert "is looked up as it is called" in message
        assert "sparse_inputs(batch)" in message
    assert "batch['values'] is changed in place" in results["written"][0]["said"][0]


def test_what_looks_otherwise_in_the_first_batch_or_is_used_early_changes_no_number() -> None:
    _agree(UNCOUNTED)


SENT_OF_ORDERS = {
    "a KeyedJaggedTensor": (8, 7),
    "names, ids and lengths": (8, 4),
    "a table of each name": (24, 12),
}
"""Of how many lookups how many are sent ahead, where that does not depend on what the step
computes."""


def test_features_in_another_order_are_looked_up_as_the_step_calls() -> None:
    results = _agree(REORDERED)
    for name, count in SENT_OF_ORDERS.items():
        assert [result["counts"]["training 0"] for result in results[name]] == [count] * 2, name


def test_a_missing_feature_is_named_as_without_look_ahead() -> None:
    for results in run_each_on_ranks({name: (models.compare, name) for name in LACKING}, 2):
        for result in results.values():
            assert "needs the features ['h'], but was called with ['f', 'g']" in result["error"]
            assert result["different"] == []
            assert len(result["losses"]) == MISSING.index("fg")


BREAKS: dict[str, tuple[int, str, str]] = {
    "written": (0, "'table' is called with an input", "rank 0: 'table' is called"),
    "second entry": (1, "'other' is called with an input", "rank 1: 'other' is called"),
    "fails before": (1, "out of cheese", "rank 1 failed inside of its step"),
    "fails between": (0, "out of cheese", "rank 0 failed inside of its step"),
}
"""What goes wrong in the step after two others: on which rank; what it says, and what others
say."""


@pytest.mark.parametrize("fault", BREAKS)
def test_all_ranks_are_notified_of_a_step_that_goes_wrong_on_one(fault: str) -> None:
    faulty, message_there, message_elsewhere = BREAKS[fault]
    per_rank_results = run_on_ranks(models.go_wrong, 2, fault, (faulty,))
    for rank, (kind, message, seconds, step) in enumerate(per_rank_results):
        assert step == 2
        assert seconds < 60
        own_kind = "KeyError" if rank == faulty else "RankError"
        assert kind == (own_kind if fault.startswith("fails") else "ProvenanceError"), message
        assert (message_there if rank == faulty else message_elsewhere) in message


def test_what_differs_on_all_ranks_ends_no_run() -> None:
    calls = {fault: (models.go_wrong, fault, (0, 1)) for fault in ("second entry", "written")}
    for results in run_each_on_ranks(calls, 2):
        assert {(result[1], result[3]) for result in results.values()} == {
            ("nothing was raised", STEPS - 1)
        }
