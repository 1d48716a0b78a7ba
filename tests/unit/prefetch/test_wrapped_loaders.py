"""A loader of the user's stays one of its class for the user's code, whatever is wrapped around
it."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset

from lightning_distrec import TunedDDPStrategy
from tests.support.trainers import one_process_trainer


class Named(DataLoader[Any]):
    """A loader with an attribute of its own."""

    label = "as made"


class Stream(IterableDataset[Any]):
    """Three samples without a number."""

    def __iter__(self) -> Any:
        return iter(torch.ones(3, 32))


class Looks(pl.Callback):
    """Notes the training loader as a callback finds it, and changes it."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        loader: Any = trainer.train_dataloader
        loader.label = "changed"
        self.seen = (
            isinstance(loader, Named),
            isinstance(loader, DataLoader),
            loader.batch_size,
            loader.label,
        )


@pytest.mark.parametrize("dataset", [torch.ones(3, 32), Stream()])
def test_callbacks_find_a_loader_of_the_users_class(dataset: Any) -> None:
    looks, loader = Looks(), Named(dataset)
    trainer = one_process_trainer(TunedDDPStrategy(), callbacks=[looks], limit_val_batches=0)
    trainer.fit(BoringModel(), loader)
    assert looks.seen == (True, True, 1, "changed")
    assert trainer.global_step == 3
