"""Ids outside of a table: told on every rank with feature, table, id and range, under every cut."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.click_model import ClickModel, SequenceModel, seeded, train_sharded
from tests.support.parameters import slow_except
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks


class WithBadId(ClickModel):
    """Gives one rank an id that feature c's table does not have, at one step."""

    bad_id = 99

    def on_after_batch_transfer(
        self, batch: dict[str, Tensor], dataloader_idx: int
    ) -> dict[str, Tensor]:
        if len(self.losses) == 2 and rank_and_num_ranks()[0] == 1:
            first = int(batch["lengths"][:16].sum())  # the first id of feature c
            assert batch["lengths"][16:24].sum() > 0
            batch = dict(batch, ids=batch["ids"].clone())
            batch["ids"][first] = self.bad_id
        return batch


def _train(cut: str, mode: str, bad_id: int = 99) -> dict[str, Any]:
    model = seeded(WithBadId, torch.optim.SGD, {"lr": 1.0})
    model.bad_id = bad_id
    strategy = {
        "sharding_types": [cut],
        "check_ids": mode,
        "tables": {"narrow": {"min_partition": 4}},
    }
    return train_sharded(model, 5, strategy)[0].final_state


@pytest.mark.parametrize(
    ("cut", "bad_id"),
    slow_except(
        [("table_wise", 37), ("row_wise", 10**12), ("column_wise", -1)],
        product(["table_wise", "row_wise", "column_wise"], [37, 10**12, -1]),
    ),
)
def test_an_id_out_of_range_is_an_error_on_every_rank(cut: str, bad_id: int) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_train, 2, cut, "error", bad_id)
    message = (
        f"IdsError: feature 'c' of table 'ebc.narrow' has the id {bad_id}, but the table "
        "has rows 0 to 36"
    )
    assert str(failed.value).count(message) == 2


@pytest.mark.parametrize("mode", slow_except(["warn"], ["warn", "ignore"]))
def test_row_zero_is_looked_up_in_place_of_an_id_out_of_range(mode: str) -> None:
    actual = [run_on_warm_ranks(_train, 2, cut, mode)[0] for cut in ("table_wise", "row_wise")]
    expected = run_on_warm_ranks(_train, 2, "table_wise", "error", 0)[0]
    for state in actual:
        assert max(float((state[key] - expected[key]).abs().max()) for key in expected) <= 1e-6


class SequencesWithBadId(SequenceModel, WithBadId):
    """The same over an EmbeddingCollection."""


def _train_sequences() -> None:
    train_sharded(
        seeded(SequencesWithBadId, torch.optim.SGD, {"lr": 1.0}),
        5,
        {"sharding_types": ["row_wise"]},
    )


def test_sequence_tables_are_checked_too() -> None:
    with pytest.raises(RankFailed, match="feature 'c' of table 'ebc.narrow' has the id 99"):
        run_on_warm_ranks(_train_sequences, 2)


def _warned() -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train("row_wise", "warn")
    return [
        str(w.message) for w in caught if "out" in str(w.message) or "has the id" in str(w.message)
    ]


def test_the_warning_comes_from_the_rank_that_has_the_ids() -> None:
    first, second = run_on_warm_ranks(_warned, 2)
    assert first == []
    assert len(second) == 1
    assert "feature 'c' of table 'ebc.narrow' has the id 99" in second[0]
