"""Loggers get the same steps in a resumed run as in one that never stopped, wherever the checkpoint
was saved."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import TunedDDPStrategy
from tests.support.trainers import one_process_trainer

PLACES = {
    "on_train_batch_start": 4,
    "on_train_batch_end": 5,
    "on_validation_batch_end": 6,
    "on_validation_end": 6,
    "on_train_epoch_end": 8,
}
"""Hook -> batches of both epochs before the one, in the second epoch, in which a checkpoint is
saved."""


class Saves(pl.Callback):
    """Saves a checkpoint in one hook, once."""

    def __init__(self, place: str, file: Path) -> None:
        self.place, self.file = place, file
        for name in PLACES:
            setattr(self, name, lambda trainer, *args, name=name: self._called(trainer, name))

    def _called(self, trainer: pl.Trainer, name: str) -> None:
        num_ready = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if (
            name == self.place
            and not self.file.exists()
            and num_ready >= PLACES[name]
            and not trainer.sanity_checking
        ):
            trainer.save_checkpoint(self.file)


class Logs(BoringModel):
    """Logs in training and validation."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("train", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", float(self.global_step))


def _logged(folder: Path, num_accumulated: int, **options: Any) -> list[str]:
    logger, path = CSVLogger(folder), options.pop("ckpt_path", None)
    trainer = one_process_trainer(
        TunedDDPStrategy(),
        max_epochs=3,
        val_check_interval=2,
        log_every_n_steps=1,
        logger=logger,
        accumulate_grad_batches=num_accumulated,
        callbacks=[LearningRateMonitor(), *options.pop("callbacks", [])],
    )
    data = DataLoader(torch.arange(128.0).reshape(4, 32) / 128)
    trainer.fit(Logs(), data, data, ckpt_path=path)
    return (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()


@pytest.mark.parametrize("num_accumulated", [2])
def test_a_resumed_run_logs_the_steps_of_one_that_never_stopped(
    num_accumulated: int, tmp_path: Path
) -> None:
    files = {place: tmp_path / f"{place}.ckpt" for place in PLACES}
    whole = _logged(
        tmp_path / "whole", num_accumulated, callbacks=[Saves(*item) for item in files.items()]
    )
    for place, file in files.items():
        header, *rows = _logged(tmp_path / place, num_accumulated, ckpt_path=file)
        assert header == whole[0]
        assert rows == whole[-len(rows) :], place
        assert len(rows) > 4
