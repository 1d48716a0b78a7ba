"""Runs modules without tables on the ranks of a test."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from tests.support.dense_models import KINDS, loader
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import DEFAULTS

Outcome = tuple[list[float], dict[str, Tensor]]
"""Losses of this rank, and weights."""


def fit(kind: str, strategy: Any, **settings: Any) -> Outcome:
    """Train a module of `KINDS` for two epochs. settings: of the Trainer; ckpt_path: where to go on
    from."""
    pl.seed_everything(5)
    model = KINDS[kind]()
    rank, num_ranks = rank_and_num_ranks()
    path = settings.pop("ckpt_path", None)
    trainer = pl.Trainer(
        strategy=strategy, devices=num_ranks, **(DEFAULTS | {"max_epochs": 2} | settings)
    )
    trainer.fit(model, loader(rank, num_ranks), ckpt_path=path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return model.losses, weights
