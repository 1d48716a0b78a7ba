"""Ids outside of a table: told on every rank with feature, table, id and range, under every cut."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import Case, check_refused, click_case, run_case
from tests.support.click_model import ClickModel, SequenceModel
from tests.support.ranks import rank_and_num_ranks


class WithBadId(ClickModel):
    """Gives one rank an id that feature c's table does not have, at one step."""

    def __init__(self, *args: Any, bad_id: int) -> None:
        super().__init__(*args)
        self.bad_id = bad_id

    def on_after_batch_transfer(
        self, batch: dict[str, Tensor], dataloader_idx: int
    ) -> dict[str, Tensor]:
        if len(self.losses) == 2 and rank_and_num_ranks()[0] == 1:
            first = int(batch["lengths"][:16].sum())  # the first id of feature c
            assert batch["lengths"][16:24].sum() > 0
            batch = dict(batch, ids=batch["ids"].clone())
            batch["ids"][first] = self.bad_id
        return batch


class SequencesWithBadId(SequenceModel, WithBadId):
    """The same over an EmbeddingCollection."""


def case(cut: str, mode: str, bad_id: int = 99, kind: type = WithBadId) -> Case:
    tables = {"narrow": {"min_partition": 4}}
    strategy = {"sharding_types": [cut], "check_ids": mode, "tables": tables}
    sgd = (torch.optim.SGD, {"lr": 1.0})
    return click_case(kind, sgd, bad_id=bad_id, strategy=strategy, steps=5)


@pytest.mark.parametrize(
    ("cut", "bad_id", "kind"),
    [
        ("table_wise", 37, WithBadId),
        ("row_wise", 10**12, SequencesWithBadId),
        ("column_wise", -1, WithBadId),
    ],
)
def test_an_id_out_of_range_is_an_error_on_every_rank(cut: str, bad_id: int, kind: type) -> None:
    words = f"IdsError: feature 'c' of table 'ebc.narrow' has the id {bad_id}, but the table has "
    check_refused(case(cut, "error", bad_id, kind), f"{words}rows 0 to 36")


def test_row_zero_is_looked_up_in_place_of_an_id_out_of_range() -> None:
    expected = run_case(case("table_wise", "error", 0))[0].state
    for cut, mode in (("table_wise", "ignore"), ("row_wise", "warn")):
        first, second = run_case(case(cut, mode))
        torch.testing.assert_close(first.state, expected, atol=1e-6, rtol=0.0)
        texts = [text for text in second.warnings if "has the id" in text]
        assert len(texts) == (1 if mode == "warn" else 0)
        assert all("feature 'c' of table 'ebc.narrow' has the id 99" in text for text in texts)
        # The warning comes from the rank that has the ids.
        assert not [text for text in first.warnings if "has the id" in text]
