"""The first batch of a fit, looked at while it is set up; the loader gives it again when training begins."""

from contextlib import closing
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec._compat.lightning import train_dataloaders
from lightning_distrec.prefetch.peek import first_batches, loaders_in, why_not


def first_batch(trainer: Trainer) -> tuple[Any, str]:
    """Return the first batch of the first loader that can be looked at, or None and why there is none."""
    why = "there are no batches to train on"
    for loader in loaders_in(train_dataloaders(trainer)):
        if reason := why_not(loader):
            why = reason
            continue
        with closing(first_batches(loader, 1)) as batches:
            for batch in batches:
                return batch, ""
    return None, why


def moved(trainer: Trainer, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return the batch on the device, passed through the user's hooks as the Trainer does."""
    data = getattr(trainer, "datamodule", None)
    for hook, more in (
        ("on_before_batch_transfer", ()),
        ("transfer_batch_to_device", (device,)),
        ("on_after_batch_transfer", ()),
    ):
        holder = data if data is not None and is_overridden(hook, data) else module
        batch = getattr(holder, hook)(batch, *more, 0)
    return batch
