"""Trainers of all ranks that print and write nothing."""

import multiprocessing
import os
from typing import Any

import lightning.pytorch as pl

from lightning_distrec import TorchRecShardedStrategy
from tests.support.click_model import NO_OUTPUT
from tests.support.ranks import rank_and_num_ranks

ACCELERATOR = (
    os.environ.get("RANKS_ACCELERATOR", "cpu") if multiprocessing.parent_process() else "cpu"
)
"""Of ranks: `pytest --accelerator gpu` has another one than the process that compares what they
return."""

DEFAULTS: dict[str, Any] = NO_OUTPUT | {
    "max_epochs": 1,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
    "accelerator": ACCELERATOR,
}


def make_trainer(strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """Return a trainer that shards tables. strategy: options of the strategy; options: those of the
    Trainer."""
    selection = DEFAULTS | {"devices": rank_and_num_ranks()[1]} | options
    return pl.Trainer(strategy=TorchRecShardedStrategy(**(strategy or {})), **selection)


def one_process_trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    """Return a trainer of this process alone, on its CPU."""
    settings = NO_OUTPUT | {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return pl.Trainer(strategy=strategy, **(settings | options))


def make_ddp_trainer(**options: Any) -> pl.Trainer:
    """Return the same trainer with Lightning's own strategy."""
    return pl.Trainer(strategy="ddp", devices=rank_and_num_ranks()[1], **(DEFAULTS | options))
