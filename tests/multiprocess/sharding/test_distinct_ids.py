"""Ids that a batch of sequences repeats are sent once: same numbers, and as few bytes as
planned."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_distrec import Communication
from lightning_distrec.observe.communication import IDS, ROW_GRADIENTS, ROWS
from tests.support.cases import Case, check, click_case
from tests.support.click_model import (
    FEATURES,
    SequenceModel,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

STEPS = 4
MANY: dict[str, Any] = {"tables": {"*": {"pooling_factor": 50}}}
"""By which 512 examples have more ids than the tables have rows."""


class WithPlainRows(SequenceModel):
    """Looks up an nn.Embedding too."""

    def _build(self) -> None:
        super()._build()
        self.item = torch.nn.Embedding(11, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"][: len(batch["label"])] % 11
        return super().forward(batch) + self.item(ids).sum(1)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[Tensor]:
        rows = self.ebc(KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"]))
        return [part for item in rows.values() for part in (item.values(), item.lengths())]


def case(cut: str, optimizer: str, num_ranks: int = 2, depth: int = 3) -> Case:
    strategy = {"convert_embeddings": "all", "sharding_types": [cut], "prefetch": {"depth": depth}}
    fields = {"strategy": MANY | strategy, "num_ranks": num_ranks, "steps": STEPS}
    return click_case(WithPlainRows, optimizer, join=None, **fields)


CASES = {
    "table-wise, three ranks": case("table_wise", "Adagrad", 3),
    "columns": case("column_wise", "Adam"),
    "row-wise, not prefetched": case("row_wise", "SGD", depth=1),
}


@pytest.mark.parametrize("name", CASES)
def test_ids_that_are_sent_once_train_as_in_one_process(name: str) -> None:
    check(CASES[name])


class Sequences(pl.LightningModule):
    """Sums the rows of sequences."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="item", embedding_dim=8, num_embeddings=5_000, feature_names=["clicks"]
        )
        self.rows = EmbeddingCollection(tables=[config])
        self.scale = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        return (self.scale * self.rows(batch)["clicks"].values()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _send(estimate: bool, distinct: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return by kind the bytes that this rank sent per step, and those that were planned. distinct:
    different ids."""
    rank, _ = rank_and_num_ranks()
    model, counts = Sequences(), Communication()
    planned: list[Any] = []
    model.on_train_start = lambda: planned.append(model.trainer.strategy.run_tables.plan.traffic)
    planning = {"planning": {"estimate_pooling": int(estimate)}, "batch_size_per_rank": 64}
    ids = torch.arange(64 * 50) % distinct * (5_000 // distinct)
    batch = KeyedJaggedTensor(["clicks"], ids, lengths=torch.full((64,), 50))
    options = planning | {"sharding_types": ["row_wise"], "prefetch": {"depth": 1}}
    trainer = make_trainer(options, callbacks=[counts])
    trainer.fit(model, DataLoader([batch] * 3, batch_size=None))
    sent, kinds = counts.bytes_per_step, (IDS, ROWS, ROW_GRADIENTS)
    return {kind: sent[kind] for kind in kinds}, {
        kind: planned[0].sent(kind)[rank] for kind in kinds
    }


def test_planned_bytes_are_those_that_are_sent_once() -> None:
    calls = {
        "once": (_send, True, 2_500),
        "each time": (_send, False, 2_500),
        "often": (_send, True, 500),
    }
    for actual in run_each_on_ranks(calls, 2):
        sent, planned = actual["often"]
        # eight numbers that ranks agree on, and the place for the sizes of weights
        agreed = (8 + 1) * 8
        assert sent[IDS] - agreed == pytest.approx(planned[IDS], rel=0.01)
        assert sent[ROWS] == pytest.approx(planned[ROWS], rel=0.01)
        assert sent[ROW_GRADIENTS] == pytest.approx(planned[ROW_GRADIENTS], rel=0.01)
        assert actual["each time"][0] == pytest.approx(actual["once"][0])  # 78 % are different
        assert actual["each time"][0][ROWS] > 4 * sent[ROWS]
