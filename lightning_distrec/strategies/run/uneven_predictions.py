"""Predicts all batches where ranks have unequal numbers: a rank that has had its own takes part in those of others."""

import inspect
from typing import Any

from lightning.pytorch import Trainer

from lightning_distrec._compat.lightning_data import predict_again, replace_predictions
from lightning_distrec._compat.patches import Patches
from lightning_distrec.prefetch.even_batches import Repeated, Repeats


def choose_repeats(trainer: Trainer, predicts_alone: bool) -> Repeats:
    """Return what ranks get that have had their batches. predicts_alone: whether predict_step exchanges nothing."""
    # A step that draws its batches itself would take a repeated one for one of its own.
    step = trainer.lightning_module.predict_step
    if not trainer.predicting or "dataloader_iter" in inspect.signature(step).parameters:
        return "no"
    return "empty" if predicts_alone else "last"


def join_predictions(trainer: Trainer, strategy: Any) -> Patches:
    """Let a rank run its last batch again for other ranks' batches: no hook is called, and no result is kept."""

    def take_part(repeated: Repeated, batch_idx: int, dataloader_idx: int) -> None:
        """Collective, with the predict_step of ranks that have a batch."""
        if strategy.predicts_alone:
            with strategy.evaluation_step():  # in which ranks agree to stop
                return
        predict_again(trainer, repeated.batch, batch_idx, dataloader_idx)

    return replace_predictions(trainer, Repeated, take_part)
