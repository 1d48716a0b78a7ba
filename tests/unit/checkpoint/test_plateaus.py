"""ReduceLROnPlateau in a run that resumes: as in one that never stopped, or the warning says what
it misses."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import TunedDDPStrategy
from tests.support.trainers import one_process_trainer

STEPS, EPOCHS = 4, 4


class Falls(pl.LightningModule):
    """Its rate falls after each epoch but the first, since none of them is better."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", torch.tensor(1.0))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "monitor": "loss"}}


def _fit(
    *callbacks: pl.Callback, ckpt_path: str | None = None, **extra: Any
) -> tuple[float, float, list[str]]:
    """Return a weight, the last rate, and what was said of schedulers."""
    model, batches = Falls(), DataLoader(torch.arange(float(STEPS))[:, None], batch_size=1)
    limits = {"enable_checkpointing": bool(callbacks), "num_sanity_val_steps": 1, **extra}
    trainer = one_process_trainer(TunedDDPStrategy(), callbacks=list(callbacks), **limits)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(model, batches, batches, ckpt_path=ckpt_path)
    messages = [
        str(warning.message) for warning in warned if "ReduceLROnPlateau" in str(warning.message)
    ]
    return model.layer.weight.item(), trainer.optimizers[0].param_groups[0]["lr"], messages


@pytest.mark.parametrize(
    "limit", [{"max_epochs": EPOCHS}, {"max_epochs": -1, "max_steps": STEPS * EPOCHS}]
)
def test_a_resumed_epoch_updates_plateaus_or_a_warning_says_that_one_is_missed(
    limit: dict[str, int], tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    never_stopped = _fit(saving, **limit)
    assert never_stopped[1:] == (0.1 / 2**3, [])
    for step in (2, 6, 10):
        assert _fit(ckpt_path=str(tmp_path / f"step={step}.ckpt"), **limit) == never_stopped
    (message,) = _fit(ckpt_path=str(tmp_path / "step=4.ckpt"), **limit)[2]
    assert message.startswith("ReduceLROnPlateau(monitor='loss') misses one epoch")
