"""Random programs over one embedding's weight train as in one process: losses, the weight, and the
layers around it."""

from typing import Any

import pytest

from tests.support.cases import Case, case_of, check, check_refused
from tests.support.weight_programs import STEPS, MixesBatch, WeightProgram, program_batch

TYPES = ["row_wise", "column_wise", "table_wise"]


def case(seed: int, is_gathered: bool, kind: type = WeightProgram, num_ranks: int = 2) -> Case:
    of_table = {"gathered_weight": True} if is_gathered else {"embedding_update": "dense"}
    strategy: dict[str, Any] = {
        "convert_embeddings": ["table"],
        "sharding_types": [TYPES[seed % 3]],
        "tables": {"table": of_table},
    }
    fields = {"batch": program_batch, "steps": STEPS, "limit": 5e-5, "loss_limit": 2e-5}
    return case_of(kind, seed, is_gathered, strategy=strategy, num_ranks=num_ranks, **fields)


PROGRAMS = ((39, True), (1, True), (23, True), (0, False), (1, False), (2, False))
"""Seeds, and whether the weight is gathered. 39 and 23 multiply what they have computed of it by
a part of the batch, which shards of it would not fit."""


@pytest.mark.parametrize(("seed", "is_gathered"), PROGRAMS)
def test_programs_over_a_weight_train_as_in_one_process(seed: int, is_gathered: bool) -> None:
    check(case(seed, is_gathered))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_many_programs_train_as_in_one_process(is_gathered: bool, num_ranks: int) -> None:
    for seed in range(6, 36):
        check(case(seed, is_gathered, num_ranks=num_ranks))


def test_a_tensor_that_differs_between_ranks_is_refused_on_shards() -> None:
    words = "with a tensor that differs between the ranks"
    for error in check_refused(case(0, False, MixesBatch), words):
        assert error.startswith("ShardedWeightError: ")
        assert "gathered_weight" in error
