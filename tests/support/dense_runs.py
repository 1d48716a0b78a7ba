"""Runs modules without tables on the ranks of a test."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from tests.support.dense_models import KINDS, loader
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import DEFAULTS

Outcome = tuple[list[float], dict[str, Tensor]]
"""Losses of this rank, and weights."""


def make_dense_trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """Return a Trainer of all ranks, for two epochs."""
    options = DEFAULTS | {"max_epochs": 2} | settings
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **options)


def whole_weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return copies of the weights of the last fit, gathered where they are sharded."""
    gather = getattr(trainer.strategy, "full_state_dict", trainer.lightning_module.state_dict)
    return {name: value.clone() for name, value in gather().items()}


def fit(kind: str, strategy: Any, **settings: Any) -> Outcome:
    """Train a module of `KINDS` for two epochs. settings: of the Trainer; ckpt_path: where to go on
    from."""
    pl.seed_everything(5)
    model = KINDS[kind]()
    path = settings.pop("ckpt_path", None)
    trainer = make_dense_trainer(strategy, **settings)
    trainer.fit(model, loader(*rank_and_num_ranks()), ckpt_path=path)
    return model.losses, {name: value.clone() for name, value in model.state_dict().items()}
