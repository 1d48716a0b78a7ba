"""Takes copies while a fit trains, as a callback of Lightning's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec.strategies.checkpoints.in_memory.copies import Copies


class CopyToMemory(Checkpoint):
    """Takes a copy every few steps, at the end of a batch, as ModelCheckpoint saves.

    After the last batch of an epoch it waits for the end of the epoch: Lightning would resume from a state in between
    without the epoch's validation, and count its epochs wrongly (`reset` in loops/fit_loop.py).
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._num_taken = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Count from the step at which the fit begins."""
        self._num_taken = trainer.global_step // self._copies.every

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Collective where a copy is due."""
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._take(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Collective where a copy is due."""
        self._take(trainer)

    def _take(self, trainer: Trainer) -> None:
        num_due = trainer.global_step // self._copies.every
        if num_due != self._num_taken:
            self._num_taken = num_due
            trainer.save_checkpoint(self._copies.path_at(trainer.global_step))


@contextmanager
def copying(trainer: Trainer, copies: Copies) -> Iterator[None]:
    """Take copies while a fit trains."""
    if copies.folder is None:
        rank_zero_warn(
            "checkpoint: in_memory copies nothing: this job has no name by which a restart would find its copies. "
            "Start it by torchrun or Slurm, or set stopping={'run_name': ...}."
        )
        yield
        return
    callback = CopyToMemory(copies)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)
