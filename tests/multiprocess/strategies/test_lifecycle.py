"""fit, validate, test and predict in any order and repeatedly, as a Trainer's user would call
them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.cases import (
    case_of,
    check,
    click_batch,
    click_case,
)
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    EvaluatedModel,
    join_batches,
    rank_loader,
    seeded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer


class ReorderedModel(ClickModel):
    """Names the features in another order on odd steps, and sometimes one too many."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.order = ["a", "b", "c", "d"] if batch_idx % 2 == 0 else ["d", "b", "a", "c"]
        return super().training_step(batch, batch_idx)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        features = features.permute([FEATURES.index(name) for name in self.order])
        return self.mlp(self.ebc(features).values()).squeeze(-1)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.order = ["c", "d", "b", "a"]
        return self(batch)


class NestedModel(pl.LightningModule):
    """Collections at several depths, one of them used under two names, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()

        def collection(name: str, rows: int) -> EmbeddingBagCollection:
            config = EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=rows, feature_names=["a"]
            )
            return EmbeddingBagCollection(tables=[config])

        self.towers = nn.ModuleDict({
            "left": nn.ModuleList([collection("t", 60)]),
            "right": collection("t", 61),
        })
        self.alias = self.towers["right"]
        self.still = collection("still", 60).requires_grad_(False)
        self.top = nn.Linear(32, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        towers = [self.towers["left"][0], self.towers["right"], self.alias, self.still]
        joined = torch.cat([tower(features).values() for tower in towers], 1)
        return nn.functional.binary_cross_entropy_with_logits(
            self.top(joined).squeeze(-1), batch["label"]
        )

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.towers.parameters(), "lr": 2.0},
            {"params": [*self.top.parameters(), *self.still.parameters()]},
        ]
        return torch.optim.SGD(groups, lr=0.5)


ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1})
SGD = (torch.optim.SGD, {"lr": 1.0})
NESTED = {"batch": click_batch, "join": join_batches, "steps": 10}
CASES = {
    "validated, fitted twice, predicted": click_case(
        *(EvaluatedModel, ADAGRAD),
        steps=10,
        fits=2,
        val_steps=4,
        validates_first=True,
        predicts=True,
        trainer={"num_sanity_val_steps": 2},
    ),
    "another order at every call": click_case(ReorderedModel, SGD, steps=10, predicts=True),
    "nested, shared and frozen": case_of(
        NestedModel, rests=("still",), updates={"t": "fused", "still": "frozen"}, **NESTED
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_are_those_of_one_process(name: str) -> None:
    check(CASES[name])


def _two_loaders() -> list[Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *ADAGRAD)
    loaders = [rank_loader(4, rank), rank_loader(2, rank, first=4)]
    together = make_trainer().validate(model, loaders, verbose=False)
    alone = [make_trainer().test(model, loader, verbose=False)[0] for loader in loaders]
    return [*(scores["val_loss"] for scores in alone), together]


def test_two_loaders_are_validated_each() -> None:
    for first, second, together in run_on_warm_ranks(_two_loaders, 2):
        assert together[0]["val_loss/dataloader_idx_0"] == pytest.approx(first, abs=1e-6)
        assert together[1]["val_loss/dataloader_idx_1"] == pytest.approx(second, abs=1e-6)
