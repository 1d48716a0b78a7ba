"""However the inputs of a lookup come out of a batch, ids that travel ahead of their step change no
number.

Each fit is compared, bit for bit, with the same one at prefetch={'depth': 1}, where tables are
looked up as they are called.
"""

from typing import Any

import pytest
import torch

from tests.support import recognised_models as models
from tests.support.parameters import slow_except
from tests.support.ranks import run_each_on_ranks, run_on_ranks
from tests.support.recognised_models import STEPS, compare, compare_at_depth_two

ROW_WISE, COLUMN_WISE, TABLE_WISE = (
    {"sharding_types": [f"{way}_wise"]} for way in ("row", "column", "table")
)
SPARSE = {"embedding_update": "sparse"}
OFF = {"prefetch": {"depth": 3, "computed_ids": False}}
Case = tuple[Any, ...]
"""Arguments of `compare`: the model, the optimizer, options of the strategy, of the Trainer, the
datamodule."""

KEYED: dict[str, Case] = {
    "whole": (models.WholeKjt, "SGD", TABLE_WISE),
    "whole, rows, Adagrad": (models.WholeKjt, "Adagrad", ROW_WISE),
    "whole, columns, Adam": (models.WholeKjt, "Adam", COLUMN_WISE),
    "dataclass": (models.DataclassBatch, "Adam", ROW_WISE),
    "tuple": (models.TupleBatch, "Adagrad", COLUMN_WISE),
    "lengths": (models.ByLengths, "SGD", ROW_WISE),
    "lengths, synced": (models.ByLengthsSync, "Adagrad", TABLE_WISE),
    "offsets, synced": (models.ByOffsetsSync, "Adam", TABLE_WISE),
    "weights": (models.Weighted, "SGD", COLUMN_WISE),
    "one size": (models.OneEach, "Adam", ROW_WISE),
    "collection": (models.Sequences, "SGD", ROW_WISE),
    "collection, Adam": (models.Sequences, "Adam", TABLE_WISE),
}
PLAIN: dict[str, Case] = {
    "columns": (models.SixColumns, "SGD", ROW_WISE),
    "columns, Adam": (models.SixColumns, "Adam", ROW_WISE),
    "bags of a matrix": (models.BagsOfMatrix, "Adagrad", COLUMN_WISE | OFF),
    "bags of a matrix, rows": (models.BagsOfMatrix, "SGD", ROW_WISE | OFF),
    "bags by offsets": (models.BagsByOffsets, "Adagrad", TABLE_WISE),
    "bags by made offsets": (models.BagsOfOne, "SGD", ROW_WISE),
    "three calls": (models.CalledThrice, "SGD", ROW_WISE),
    "three calls, Adam": (models.CalledThrice, "Adam", COLUMN_WISE),
    "three calls, Adagrad": (models.CalledThrice, "Adagrad", TABLE_WISE | SPARSE),
    "bf16": (models.CalledThrice, "SGD", TABLE_WISE, {"precision": "bf16-mixed"}),
    "bf16, collection": (models.WholeKjt, "Adam", ROW_WISE, {"precision": "bf16-mixed"}),
    "accumulated": (models.CalledThrice, "Adam", ROW_WISE, {"accumulate_grad_batches": 2}),
    "clipped": (models.WholeKjt, "SGD", ROW_WISE, {"gradient_clip_val": 0.05}),
}
COLUMNS: dict[str, Case] = {
    "columns, whole": (models.SixColumns, "SGD", TABLE_WISE),
    "columns by columns": (models.SixColumns, "Adam", COLUMN_WISE),
}
CHANGING: dict[str, Case] = {
    "target first": (models.TargetFirst, "SGD", ROW_WISE),
    "target first, Adam": (models.TargetFirst, "Adam", TABLE_WISE),
    "target last": (models.TargetLast, "Adagrad", COLUMN_WISE),
    "target of bags": (models.TargetBags, "Adam", ROW_WISE),
    "rate": (models.ChangesRate, "SGD", ROW_WISE),
    "rate of bags": (models.ChangesRateOfBags, "Adagrad", TABLE_WISE),
    "frozen": (models.Freezes, "SGD", ROW_WISE),
    "frozen, Adam": (models.Freezes, "Adam", TABLE_WISE),
    "alternates": (models.Alternates, "SGD", ROW_WISE),
    "alternates, Adam": (models.Alternates, "Adam", TABLE_WISE),
}


def _agree(cases: dict[str, Case], function: Any = compare) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank found in each case; every one is as it is without look-ahead."""
    calls = {name: (function, *case) for name, case in cases.items()}
    per_rank_results = run_each_on_ranks(calls, 2)
    results = {name: [rank_result[name] for rank_result in per_rank_results] for name in cases}
    for name, case_results in results.items():
        for result in case_results:
            assert result["different"] == [], name
            assert len(result["losses"]) >= STEPS, name
        assert any(
            distance > 1e-4
            for key, distance in case_results[0]["moved"].items()
            if "score" not in key
        ), name
    return results


def _assert_ahead(results: dict[str, list[dict[str, Any]]], reasons: int = 0) -> None:
    """All lookups but those of the first step were sent ahead; nothing was said but `reasons`."""
    for name, case_results in results.items():
        for rank, result in enumerate(case_results):
            lookups, ahead = result["counts"]["training 0"]
            lookups_per_step, remainder = divmod(lookups, len(result["losses"]))
            assert remainder == 0, name
            assert ahead == lookups - lookups_per_step, (name, lookups, ahead)
            assert len(result["said"]) == (reasons if rank == 0 else 0), (name, result["said"])


def test_keyed_jagged_tensors_of_any_batch_travel_ahead() -> None:
    _assert_ahead(_agree(KEYED))


def test_inputs_of_plain_embeddings_travel_ahead() -> None:
    _assert_ahead(_agree(PLAIN))


def test_columns_of_a_matrix_travel_ahead_to_tables_that_are_not_cut_by_rows() -> None:
    _assert_ahead(_agree(COLUMNS))


def test_rows_that_change_after_the_step_began_are_looked_up_again() -> None:
    results = _agree(CHANGING)
    for name in ("alternates", "alternates, Adam"):
        for result in results.pop(name):
            assert result["counts"]["training 0"] == (3 * STEPS, 3 * (STEPS - 1))
    _assert_ahead(results)


def test_two_batches_in_flight_are_as_good_as_three() -> None:
    cases = {
        name: (KEYED | PLAIN | CHANGING)[name]
        for name in ("whole", "three calls", "target first", "frozen")
    }
    _assert_ahead(_agree(cases, compare_at_depth_two))


MADE: dict[str, Case] = {
    "hooks of the module": (models.Hooked, "SGD", ROW_WISE),
    "hooks of the datamodule": (models.ByLengths, "Adam", TABLE_WISE, {}, models.HookedData),
    "declared": (models.Declares, "Adagrad", ROW_WISE),
}


def test_hooks_make_each_batch_once_and_sparse_inputs_is_called_once_for_it() -> None:
    results = _agree(MADE)
    _assert_ahead(results)
    for name in ("hooks of the module", "hooks of the datamodule"):
        for result in results[name]:
            assert (
                result["calls"]
                == result["plain calls"]
                == {"before": STEPS, "transfer": STEPS, "after": STEPS}
            )
    for result in results["declared"]:
        assert result["declared"] == (STEPS, True)


COPIES = {"tables": {name: {"sharding_types": ["data_parallel"]} for name in ("t", "u")}}
ON_AND_OFF: dict[str, tuple[Case, tuple[int, int]]] = {
    "every other": ((models.EveryOther, "SGD", ROW_WISE), (8, 6)),
    "every other, Adam": ((models.EveryOther, "Adam", TABLE_WISE), (8, 6)),
    "every other, later": ((models.EveryOtherLater, "Adam", ROW_WISE), (7, 4)),
    "every other, bags": ((models.EveryOtherBags, "Adagrad", ROW_WISE), (8, 6)),
    "every other, copies": ((models.EveryOtherBags, "Adam", COPIES), (8, 6)),
}
"""Cases, and of how many lookups how many were sent ahead."""


def test_lookups_that_some_steps_leave_out_change_no_number() -> None:
    results = _agree({name: case for name, (case, _) in ON_AND_OFF.items()})
    for name, (_, count) in ON_AND_OFF.items():
        assert [result["counts"]["training 0"] for result in results[name]] == [count] * 2, name


COMPUTED: dict[str, tuple[Case, tuple[int, int]]] = {
    "hashed": ((models.Hashes, "SGD", ROW_WISE), (STEPS, 0)),
    "one of two": ((models.OneOfTwo, "Adagrad", ROW_WISE), (2 * STEPS, STEPS - 1)),
    "positions": ((models.Positions, "SGD", ROW_WISE), (2 * STEPS, STEPS - 1)),
    "one type": ((models.OneType, "Adam", ROW_WISE), (2 * STEPS, STEPS - 1)),
    "written": ((models.WritesFirst, "Adam", TABLE_WISE), (STEPS, 0)),
}


def test_what_is_computed_in_the_step_is_looked_up_there_and_the_reason_is_reported_once() -> None:
    cases = {
        name: (kind, optimizer, options | OFF)
        for name, ((kind, optimizer, options), _) in COMPUTED.items()
    }
    results = _agree(cases)
    for name, (_, count) in COMPUTED.items():
        assert [result["counts"]["training 0"] for result in results[name]] == [count] * 2, name
        messages = results[name][0]["said"]
        assert len(messages) == 1, (name, messages)
        assert "is looked up as it is called" in messages[0]
        assert "sparse_inputs(batch)" in messages[0]
        assert results[name][1]["said"] == []
    assert "batch['values'] is changed in place" in results["written"][0]["said"][0]


RANGE: dict[str, tuple[Case, tuple[int, int]]] = {
    "range of columns": ((models.BagsOfMatrix, "SGD", ROW_WISE), (2 * STEPS, STEPS - 1)),
}


def test_what_is_computed_in_the_step_is_looked_up_there_during_the_trial() -> None:
    tried = {name: case for name, case in (COMPUTED | RANGE).items() if name != "written"}
    results = _agree({name: case for name, (case, _) in tried.items()})
    for name, (_, count) in tried.items():
        assert [result["counts"]["training 0"] for result in results[name]] == [count] * 2, name
        assert [result["said"] for result in results[name]] == [[], []], name


AMBIGUOUS: dict[str, Case] = {
    "sequences of the longest of their batch": (models.Shifted, "SGD", ROW_WISE),
    "one tensor under two names at first": (models.OneTensorFirst, "SGD", ROW_WISE),
    "one id each at first": (models.OneEachAtFirst, "SGD", ROW_WISE),
}


def test_what_looks_otherwise_in_the_first_batch_changes_no_number() -> None:
    _agree(AMBIGUOUS)


def test_gradients_used_at_the_beginning_of_a_step_reach_its_lookups() -> None:
    cases = {
        f"{optimizer}, {rows}": (models.StepsFirst, optimizer, options)
        for optimizer in ("SGD", "Adam")
        for rows, options in (("rows", ROW_WISE), ("whole", TABLE_WISE))
    }
    _agree(cases)


def test_a_rank_may_look_at_its_rows_earlier_than_others() -> None:
    _agree({"rank 0 looks": (models.LooksOnRankZero, "SGD", TABLE_WISE)})


def test_the_steps_of_evaluation_have_inputs_of_their_own() -> None:
    plain, ahead = (run_each_on_ranks({"all": (models.evaluate, depth)}, 2) for depth in (1, 3))
    for rank in range(2):
        plain_result, ahead_result = plain[rank]["all"], ahead[rank]["all"]
        assert plain_result["metrics"] == ahead_result["metrics"]
        assert len(plain_result["metrics"]) >= 6
        assert all(map(torch.equal, plain_result["predicted"], ahead_result["predicted"]))
        assert len(ahead_result["predicted"]) == STEPS
        assert {
            key: torch.equal(value, ahead_result["state"][key])
            for key, value in plain_result["state"].items()
        } == dict.fromkeys(plain_result["state"], True)
        assert ahead_result["counts"] == {
            "training 0": (2 * STEPS, 2 * (STEPS - 1)),
            "validation 0": (2 * STEPS, 2 * (STEPS - 1)),
            "validation 1": (2 * STEPS, 2 * (STEPS - 1)),
            "test 0": (STEPS, STEPS - 1),
            "prediction 0": (STEPS, STEPS - 1),
        }


# -- what was prefetched is not called

BREAKS: dict[str, tuple[str, tuple[int, ...], str, str]] = {
    "another entry, one rank": (
        "another entry",
        (1,),
        "'table' is called with an input",
        "rank 1: 'table' is called",
    ),
    "written, one rank": (
        "written",
        (0,),
        "'table' is called with an input",
        "rank 0: 'table' is called",
    ),
    "fails before": ("fails before", (1,), "out of cheese", "rank 1 failed inside of its step"),
    "fails between": ("fails between", (0,), "out of cheese", "rank 0 failed inside of its step"),
    "another entry of the second": (
        "second entry",
        (1,),
        "'other' is called with an input",
        "rank 1: 'other' is called",
    ),
}
"""What goes wrong in the step after two others, on which ranks; what they say, and what the others
say."""


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("rows", slow_except(["row_wise"], ["row_wise", "table_wise"]))
def test_all_ranks_are_notified_of_a_step_that_goes_wrong_on_one(name: str, rows: str) -> None:
    fault, ranks, message_there, message_elsewhere = BREAKS[name]
    per_rank_results = run_on_ranks(models.go_wrong, 2, fault, ranks, rows)
    for rank, (kind, message, seconds, step) in enumerate(per_rank_results):
        assert step == 2
        assert seconds < 60
        if rank in ranks:
            assert kind == ("KeyError" if fault.startswith("fails") else "ProvenanceError"), message
            assert message_there in message
        else:
            assert kind == ("RankError" if fault.startswith("fails") else "ProvenanceError"), (
                message
            )
            assert message_elsewhere in message


def test_what_differs_on_all_ranks_ends_no_run() -> None:
    calls = {
        fault: (models.go_wrong, fault, (0, 1), "row_wise")
        for fault in ("another entry", "written")
    }
    for results in run_each_on_ranks(calls, 2):
        assert {(result[1], result[3]) for result in results.values()} == {
            ("nothing was raised", STEPS - 1)
        }
