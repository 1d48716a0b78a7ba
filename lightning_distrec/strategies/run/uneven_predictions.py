"""Predicts all batches where ranks have unequal numbers: a rank that has had its own takes part in those of others."""

import inspect
from typing import Any

from lightning.pytorch import Trainer
from torch import nn

from lightning_distrec._compat.lightning_data import predict_again, replace_predictions
from lightning_distrec._compat.patches import Patches
from lightning_distrec.prefetch.even_batches import Repeated, Repeats


def choose_repeats(trainer: Trainer, strategy: Any) -> Repeats:
    """Return what ranks get that have had their batches."""
    # A step that draws its batches itself would take a repeated one for one of its own.
    step = trainer.lightning_module.predict_step
    if not trainer.predicting or "dataloader_iter" in inspect.signature(step).parameters:
        return "no"
    return "empty" if _predicts_alone(strategy, trainer.lightning_module) else "last"


def _predicts_alone(strategy: Any, module: nn.Module) -> bool:
    """Return whether predict_step exchanges nothing. Tables that an earlier run has sharded exchange rows in it."""
    # By name: what defines the class imports torchrec, which other strategies do without.
    return strategy.predicts_alone and all(
        kind.__name__ != "ShardedProxy" for child in module.modules() for kind in type(child).__mro__
    )


def join_predictions(trainer: Trainer, strategy: Any) -> Patches:
    """Let a rank run its last batch again for other ranks' batches: no hook is called, and no result is kept."""

    def take_part(repeated: Repeated, batch_idx: int, dataloader_idx: int) -> None:
        """Collective, with the predict_step of ranks that have a batch."""
        if _predicts_alone(strategy, trainer.lightning_module):
            with strategy.evaluation_step():  # in which ranks agree to stop
                return
        predict_again(trainer, repeated.batch, batch_idx, dataloader_idx)

    return replace_predictions(trainer, Repeated, take_part)
