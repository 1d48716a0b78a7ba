"""The batch size that plans are made for: where none is set, the one that the job's own loader or hparams name."""

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr

from lightning_distrec._compat.lightning import given_train_loaders
from lightning_distrec.pipeline.peek import loaders_in
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings


def with_batch_size(settings: TableSettings, trainer: Trainer, module: LightningModule) -> TableSettings:
    """Return the settings with the batch size of the loader that fit was given, or else of `batch_size` attributes.

    Those of the datamodule, the module and their hparams, where Lightning's tuner looks too. Loaders that hooks make
    are not asked for: hooks run once more only where an option says so.
    """
    if settings.batch_size_per_rank is not None:
        return settings
    for loader in loaders_in(given_train_loaders(trainer)):
        for source in (loader, getattr(loader, "batch_sampler", None)):
            if is_size(size := getattr(source, "batch_size", None)):
                return replace(settings, batch_size_per_rank=size, batch_size_origin="of the loader")
    if lightning_hasattr(module, "batch_size") and is_size(size := lightning_getattr(module, "batch_size")):
        return replace(settings, batch_size_per_rank=size, batch_size_origin="batch_size of the data or the module")
    return settings


def is_size(value: Any) -> bool:
    """Whether this is a batch size."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
