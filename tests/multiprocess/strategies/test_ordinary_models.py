"""Recommenders as their users write them, unchanged, train and predict sharded as in one unsharded
process."""

from functools import partial
from typing import Any

import pytest
from torch import nn

from lightning_distrec.sharding.proxies import ShardedProxy
from tests.support.cases import Case, check
from tests.support.embedding_models import SASRec, TwoTower, pairs, sequences
from tests.support.ranks import rank_and_num_ranks


def zeros_but_on_rank_0(kind: type) -> Any:
    """Return a model; rank 0's weights count, as under DDP."""
    model = kind()
    if rank_and_num_ranks()[0]:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return model


def sharded(trainer: Any) -> list[str]:
    modules = trainer.lightning_module.named_modules()
    return [path for path, child in modules if isinstance(child, ShardedProxy)]


def case(kind: type, **strategy: Any) -> Case:
    batch = pairs if kind is TwoTower else sequences
    fields = {"steps": 5, "limit": 1e-5, "predicts": True, "look": sharded}
    trainer = {"enable_model_summary": True}
    module = partial(zeros_but_on_rank_0, kind)
    return Case(
        module=module, plain=kind, batch=batch, strategy=strategy, trainer=trainer, **fields
    )


ITEMS = {"convert_embeddings": ["item_embedding"], "sharding_types": ["column_wise"]}
LARGE = {"min_rows": 60, "sharding_types": ["row_wise"]}
CASES: dict[str, tuple[Case, list[str]]] = {
    "two towers": (
        case(TwoTower, convert_embeddings="all"),
        ["user_embedding", "item_embedding"],
    ),
    "sequences, listed": (case(SASRec, **ITEMS), ["item_embedding"]),
    "sequences, large": (case(SASRec, **LARGE), ["item_embedding"]),
}


@pytest.mark.parametrize("name", CASES)
def test_ordinary_models_train_and_predict_as_in_one_unsharded_process(name: str) -> None:
    case, paths = CASES[name]
    for outcome in check(case):
        assert outcome.seen == paths
