"""Lets ModelCheckpoint see the checkpoint in flight, which has no name on the file system yet."""

from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distrec.checkpoint.save import Saver
from lightning_distrec.errors import ConfigError


def announce_in_flight(trainer: Trainer, saver: Saver) -> None:
    """Let ModelCheckpoint see the checkpoint in flight.

    It appends a version to a name that exists, and asks the file system, where the name is not there yet: hence the
    replaced method.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            if callback.save_last == "link":
                raise ConfigError(
                    "ModelCheckpoint(save_last='link') and async_save: the link would lead to a checkpoint that is "
                    "not there yet. Set save_last=True."
                )
            callback.file_exists = partial(_exists, saver, callback)  # type: ignore[method-assign]


def _exists(saver: Saver, callback: ModelCheckpoint, filepath: Any, trainer: Trainer) -> bool:
    is_being_written = saver.in_flight == Path(filepath).absolute()
    return is_being_written or type(callback).file_exists(callback, filepath, trainer)
