"""A model with plain embeddings is validated, fitted twice, saved and loaded as if nothing of it
were sharded."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.support.click_model import seeded
from tests.support.embedding_models import (
    TwoTower,
    loader,
    pairs,
    too_far,
    train_unsharded,
    whole_state,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 5


class Nested(TwoTower):
    """Embeddings in nested places, one of them under two names, and state_dict keys before and
    after them."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([
            nn.ModuleDict({"item": nn.Embedding(70, 16)}),
            nn.ModuleDict(),
        ])
        self.towers[1]["tags"] = nn.EmbeddingBag(50, 16, mode="mean")
        self.scale = nn.Parameter(torch.ones(1))
        self.shared = self.towers[0]["item"]
        self.register_buffer("offset", torch.zeros(1))
        self.keys: list[str] = []

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = self.towers[0]["item"](item) + self.shared(item.flip(0))
        tags = self.towers[1]["tags"](user.unsqueeze(1))
        return super().forward(user, item) + self.scale * (tags @ rows.T) + self.offset

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.keys = list(self.state_dict())


def _live(folder: str) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    actual: dict[str, Any] = {}
    options = {
        "convert_embeddings": "all",
        "tables": {
            "towers.0.item": {"sharding_types": ["column_wise"], "min_partition": 4},
            "towers.1.tags": {"sharding_types": ["row_wise"]},
        },
    }
    model = seeded(Nested)
    keep = ModelCheckpoint(folder, filename="last", save_weights_only=True)
    in_one_file = options | {"checkpoint": {"distributed": False}}
    trainer = make_trainer(in_one_file, callbacks=[keep], enable_checkpointing=True)
    validation = loader([pairs(step, rank) for step in range(100, 103)])
    actual["before"] = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, loader([pairs(step, rank) for step in range(STEPS)]), validation)
    actual["keys"] = model.keys
    actual["first"] = whole_state(model)
    actual["after"] = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    actual["predicted"] = trainer.predict(model, validation)
    second = make_trainer(options)
    second.fit(model, loader([pairs(step, rank) for step in range(STEPS, 2 * STEPS)]), validation)
    actual["second"] = whole_state(model)
    actual["path"] = keep.best_model_path
    return actual


def _validation_loss(model: TwoTower, num_ranks: int) -> float:
    losses = []
    with torch.no_grad():
        for step in range(100, 103):
            for rank in range(num_ranks):
                scores = model(*pairs(step, rank))
                losses.append(float(nn.functional.cross_entropy(scores, torch.arange(len(scores)))))
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in the life of one Nested model."""
    return run_on_warm_ranks(_live, 2, str(tmp_path_factory.mktemp("life")))


def test_validate_fit_predict_and_a_second_fit_continue_each_other(
    life: list[dict[str, Any]],
) -> None:
    start = seeded(Nested)
    assert life[0]["before"] == pytest.approx(_validation_loss(start, 2), abs=1e-6)
    first = train_unsharded(
        start, [[pairs(step, rank) for rank in range(2)] for step in range(STEPS)]
    )
    assert not too_far(life[0]["first"], first.state_dict(), 1e-5)
    assert life[0]["after"] == pytest.approx(_validation_loss(first, 2), abs=1e-5)
    for rank in range(2):
        with torch.no_grad():
            expected = [first(*pairs(step, rank)) for step in range(100, 103)]
        torch.testing.assert_close(life[rank]["predicted"], expected, atol=1e-4, rtol=0)
    second = train_unsharded(
        first, [[pairs(step, rank) for rank in range(2)] for step in range(STEPS, 2 * STEPS)]
    )
    assert not too_far(life[0]["second"], second.state_dict(), 1e-5)


def test_the_state_dict_has_the_unsharded_keys_in_their_order_on_every_rank(
    life: list[dict[str, Any]],
) -> None:
    expected = list(seeded(Nested).state_dict())
    assert [actual["keys"] for actual in life] == [expected, expected]


def test_a_checkpoint_loads_into_the_users_own_module(life: list[dict[str, Any]]) -> None:
    path = life[0]["path"]
    model = Nested()
    state = torch.load(path, weights_only=True)["state_dict"]
    model.load_state_dict(state, strict=True)
    assert not too_far(model.state_dict(), life[0]["first"], 0)
    assert not too_far(Nested.load_from_checkpoint(path).state_dict(), life[0]["first"], 0)


def _evaluate(path: str) -> list[float]:
    rank, _ = rank_and_num_ranks()
    actual = []
    for selected in ("all", "none"):
        model = Nested()
        trainer = make_trainer({"convert_embeddings": selected, "sharding_types": ["row_wise"]})
        batches = loader([pairs(step, rank) for step in range(100, 103)])
        actual.append(
            float(trainer.test(model, batches, ckpt_path=path, verbose=False)[0]["val_loss"])
        )
    return actual


def test_a_checkpoint_is_evaluated_over_other_ranks_sharded_and_whole(
    life: list[dict[str, Any]],
) -> None:
    model = Nested.load_from_checkpoint(life[0]["path"])
    assert run_on_warm_ranks(_evaluate, 3, life[0]["path"])[0] == pytest.approx(
        [_validation_loss(model, 3)] * 2, abs=1e-5
    )
