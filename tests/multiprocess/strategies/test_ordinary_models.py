"""Recommenders as their users write them, unchanged, train and predict sharded as in one unsharded
process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_distrec.sharding.proxies import ShardedProxy
from tests.support.click_model import seeded
from tests.support.embedding_models import (
    SASRec,
    TwoTower,
    loader,
    pairs,
    sequences,
    too_far,
    train_unsharded,
    whole_state,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

STEPS = 5
MODELS: dict[str, tuple[type, Callable[[int, int], Any]]] = {
    "TwoTower": (TwoTower, pairs),
    "SASRec": (SASRec, sequences),
}


def _train_ordinary(options: dict[str, Any]) -> dict[str, Any]:
    """Return by model what was trained, predicted and sharded. Ranks other than 0 begin with other
    weights."""
    rank, _ = rank_and_num_ranks()
    actual: dict[str, Any] = {}
    for name, (kind, batch_of) in MODELS.items():
        model = seeded(kind)
        if rank:  # rank 0's weights count, as under DDP
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
        trainer = make_trainer(options, enable_model_summary=True)
        trainer.fit(model, loader([batch_of(step, rank) for step in range(STEPS)]))
        actual[name] = whole_state(model)
        actual[f"{name} predicted"] = trainer.predict(model, loader([batch_of(STEPS, rank)]))
        actual[f"{name} sharded"] = [
            path for path, child in model.named_modules() if isinstance(child, ShardedProxy)
        ]
    return actual


ITEMS_ONLY = {name: ["item_embedding"] for name in MODELS}
BOTH = {
    "TwoTower": ["user_embedding", "item_embedding"],
    "SASRec": ["item_embedding", "position_embedding"],
}
WAYS: dict[int, dict[str, tuple[dict[str, Any], dict[str, list[str]]]]] = {
    2: {
        "all": ({"convert_embeddings": "all"}, BOTH),
        "listed": (
            {"convert_embeddings": ["item_embedding"], "sharding_types": ["column_wise"]},
            ITEMS_ONLY,
        ),
    },
    3: {"large": ({"min_rows": 60, "sharding_types": ["row_wise"]}, ITEMS_ONLY)},
}
"""Ranks -> options of the strategy, and what they shard."""


@pytest.mark.parametrize("num_ranks", WAYS)
def test_ordinary_models_train_and_predict_as_in_one_unsharded_process(num_ranks: int) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        way: (_train_ordinary, options) for way, (options, _) in WAYS[num_ranks].items()
    }
    actual = run_each_on_ranks(calls, num_ranks)
    for name, (kind, batch_of) in MODELS.items():
        batches = [[batch_of(step, rank) for rank in range(num_ranks)] for step in range(STEPS)]
        trained = train_unsharded(seeded(kind), batches)
        trained.eval()
        for way, (_, sharded) in WAYS[num_ranks].items():
            assert actual[0][way][f"{name} sharded"] == sharded[name]
            assert not too_far(actual[0][way][name], trained.state_dict(), 1e-5)
            for rank in range(num_ranks):
                with torch.no_grad():
                    expected = trained.predict_step(batch_of(STEPS, rank), 0)
                torch.testing.assert_close(
                    actual[rank][way][f"{name} predicted"][0], expected, atol=1e-4, rtol=0
                )
