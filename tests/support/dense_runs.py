"""Runs modules without tables on the ranks of a test, and compares runs."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
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


def check_same(distrec: Outcome, other: Outcome, most: float = 1e-6) -> None:
    """Assert that losses and weights differ by so much at most."""
    assert distrec[0] == pytest.approx(other[0], rel=most, abs=most)
    assert distrec[1].keys() == other[1].keys()
    for name, value in distrec[1].items():
        torch.testing.assert_close(value, other[1][name], atol=most, rtol=most, msg=name)
