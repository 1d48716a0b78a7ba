"""What a step computes from its batch is prefetched, or refused with a reason; no number changes.

Each fit is compared, bit for bit, with the same one at prefetch={'depth': 1}.
"""

from typing import Any

import pytest
import torch

from lightning_distrec.prefetch.recorder import READS_BATCH
from tests.support import computed_models as models
from tests.support.computed_models import SHAPES, STEPS, Fitted
from tests.support.ranks import run_on_warm_ranks

READING = [name for name, shape in SHAPES.items() if shape.refused == READS_BATCH]
"""Shapes that read a value of the batch: what follows them in a step may depend on it."""
CHANGES = {
    "schedule_after": "something that they depend on has changed since the first steps",
    "in_turns": "an input that is not the part of the batch",
    "rewritten_buffer": "something that they depend on has changed since the first steps",
}
"""Shapes that differ on all ranks from what was prefetched, and what is said."""
DIFFER = (*CHANGES, *(name for name in SHAPES if name.endswith("_on_rank_1")))
ALONE = ("python_random", "branch_on_rows", *DIFFER)
"""Shapes that no computed input may follow."""
OTHERS = ("cat_two", "hashing", "roll_negatives")
TOGETHER = [name for name in SHAPES if name not in (*READING, *ALONE, *OTHERS)]


def fit(names: Any) -> list[tuple[Fitted, Fitted]]:
    """Return what each rank found; no number is another one than without look-ahead."""
    per_rank_results: list[tuple[Fitted, Fitted]] = run_on_warm_ranks(
        models.fit_at_both_depths, 2, names
    )
    for plain, ahead in per_rank_results:
        assert (plain.error, ahead.error) == ("", "")
        assert ahead.losses == plain.losses
        assert ahead.weights.keys() == plain.weights.keys()
        for name, weight in plain.weights.items():
            assert torch.equal(weight, ahead.weights[name]), name
    assert per_rank_results[0][0].weights
    return per_rank_results


def ahead_in_last_epoch(fitted: Fitted) -> int:
    """Return how many lookups of the last epoch were sent ahead."""
    (_, earlier), (_, later) = fitted.ahead[-2:]
    return later - earlier


def expected_ahead(*names: str) -> int:
    """Return how many lookups of an epoch are sent ahead.

    All but those of its first step; what is computed of its last batch, which is smaller, is not
    sent either.
    """
    calls = sum(SHAPES[name].calls for name in names)
    return calls * (STEPS - 2) + sum(SHAPES[name].found for name in names)


def test_what_is_computed_in_the_step_is_prefetched_or_refused_with_the_reason() -> None:
    per_rank_results = fit(TOGETHER)
    for _, ahead in per_rank_results:
        assert ahead_in_last_epoch(ahead) == expected_ahead(*TOGETHER)
    warnings = per_rank_results[0][1].warnings
    refused = [name for name in TOGETHER if SHAPES[name].refused is not None]
    assert len(warnings) == len(refused), warnings
    for name in refused:
        shape_warnings = [warning for warning in warnings if f"'tables.{name}." in warning]
        assert len(shape_warnings) == 1, (name, warnings)
        assert str(SHAPES[name].refused) in shape_warnings[0]
        assert "sparse_inputs(batch)" in shape_warnings[0]
    assert per_rank_results[1][1].warnings == []


def test_what_follows_a_value_that_python_has_read_is_looked_up_as_it_is_called() -> None:
    names = [*OTHERS[::2], *READING, "hashing"]
    per_rank_results = fit(names)
    warnings = per_rank_results[0][1].warnings
    assert len(warnings) == len(READING) + 1, warnings
    for name in (*READING, "hashing"):
        [warning] = [warning for warning in warnings if f"'tables.{name}.t'" in warning]
        assert READS_BATCH in warning
    for _, ahead in per_rank_results:
        assert ahead_in_last_epoch(ahead) == expected_ahead("cat_two", "roll_negatives")


@pytest.mark.parametrize("name", ["branch_on_rows", "python_random"])
def test_what_cannot_be_known_ahead_is_looked_up_as_it_is_called(name: str) -> None:
    per_rank_results = fit([name])
    if (reason := SHAPES[name].refused) is not None:
        assert any(reason in warning for warning in per_rank_results[0][1].warnings)
    for _, ahead in per_rank_results:
        assert ahead_in_last_epoch(ahead) <= SHAPES[name].calls * (STEPS - 1)


def test_calls_that_differ_on_all_ranks_are_looked_up_as_they_are_called_from_then_on() -> None:
    (_, first), (_, other) = fit([*CHANGES, "attribute_offsets"])
    assert len(first.warnings) == len(CHANGES), first.warnings
    for name, cause in CHANGES.items():
        [warning] = [
            warning for warning in first.warnings if f"'tables.{name}.t' is looked up" in warning
        ]
        assert cause in warning
    assert other.warnings == []
    assert ahead_in_last_epoch(first) == expected_ahead("attribute_offsets")


BESIDE = [
    ("schedule_on_rank_1",),
    ("random_negatives", "attribute_offsets", "schedule_on_rank_1"),
    ("fewer_on_rank_1", "cat_two"),
    ("other_bags_on_rank_1",),
    ("zeros_fail_on_rank_1",),
    ("zeros_fail_between_on_rank_1",),
]
"""A call that differs on rank 1 alone, without and with lookups that are made as they are
called."""


def test_all_ranks_hear_of_a_call_that_differs_on_one_of_them() -> None:
    # On ranks that go on to fit other models: nothing of a failed step may stay in their groups.
    first, other = run_on_warm_ranks(models.fit_each, 2, BESIDE)
    for names, found_there, fitted in zip(BESIDE, other, first, strict=True):
        assert found_there.error.startswith("ProvenanceError: 'tables."), (names, found_there.error)
        assert "prefetch={'computed_ids': False}" in found_there.error
        assert fitted.error == found_there.error.replace(
            "ProvenanceError: ", "ProvenanceError: rank 1: "
        )
        assert len(fitted.losses) <= 8
