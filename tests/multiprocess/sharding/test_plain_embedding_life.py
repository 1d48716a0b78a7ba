"""A model with plain embeddings is fitted twice, validated, predicts and is saved as if nothing of
it were sharded."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.cases import case_of, check
from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, pairs, too_far


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


def _save(trainer: Any) -> list[str]:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt", weights_only=True)
    return trainer.lightning_module.keys


def test_a_model_is_fitted_twice_validated_predicts_and_is_saved(tmp_path: Path) -> None:
    strategy = {
        "convert_embeddings": "all",
        "tables": {
            "towers.0.item": {"sharding_types": ["column_wise"], "min_partition": 4},
            "towers.1.tags": {"sharding_types": ["row_wise"]},
        },
        "checkpoint": {"distributed": False},
    }
    fields = {"batch": pairs, "steps": 5, "val_steps": 3, "fits": 2, "limit": 1e-5}
    fields |= {"predicts": True, "look": _save}
    trainer = {"default_root_dir": str(tmp_path)}
    outcomes = check(case_of(Nested, strategy=strategy, trainer=trainer, **fields))
    keys = list(seeded(Nested).state_dict())
    assert [outcome.seen for outcome in outcomes] == [keys, keys]
    path = tmp_path / "it.ckpt"
    model = Nested()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    assert not too_far(model.state_dict(), outcomes[0].state, 0)
    assert not too_far(Nested.load_from_checkpoint(path).state_dict(), outcomes[0].state, 0)
