"""A fit in which one place of user code raises on one rank alone."""

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from tests.support.launched_script import Clicks, Numbered
from tests.support.ranks import rank_and_num_ranks

FAULTY = 1
SAID = "a fault of this rank alone"
HOOKS = (
    "setup",
    "configure_optimizers",
    "train_dataloader",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
"""Of the module. Those that are called in each step raise in the third, the others in their first
call."""
IN_STEPS = ("on_train_batch_start", "training_step", "on_before_zero_grad", "on_after_backward")


class Raises(Clicks):
    """Raises in one hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self._calls = 0
        setattr(self, hook, partial(self._hook, getattr(self, hook), 3 if hook in IN_STEPS else 1))

    def _hook(self, usual: Any, due: int, *args: Any, **options: Any) -> Any:
        self._calls += 1
        if self._calls == due and rank_and_num_ranks()[0] == FAULTY:
            raise ValueError(SAID)
        return usual(*args, **options)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Numbered(), batch_size=2)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Numbered(), batch_size=2)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def fit(hook: str, folder: str) -> None:
    """Fit; what the rank prints goes to a file of the folder."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{rank_and_num_ranks()[0]}.out", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.manual_seed(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=rank_and_num_ranks()[1],
        strategy=TorchRecShardedStrategy(),
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)],
    )
    trainer.fit(Raises(hook))
