"""Objects that a module's hook puts into checkpoints: the start says what follows, and `pickles` is
the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.export_checkpoint import export
from tests.support.trainers import one_process_trainer


class WithLoss(BoringModel):
    """Saves an object, as darts' modules do."""

    delta = 0.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss_fn"] = nn.HuberLoss(delta=0.25)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.delta = checkpoint["loss_fn"].delta


def _fit(folder: Path, max_epochs: int, pickles: bool, ckpt_path: Path | None = None) -> WithLoss:
    trainer = one_process_trainer(
        TunedDDPStrategy(checkpoint={"pickles": pickles}),
        max_epochs=max_epochs,
        limit_train_batches=2,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, filename="it")],
    )
    module = WithLoss()
    trainer.fit(module, ckpt_path=ckpt_path)
    return module


def test_objects_of_a_hook_are_announced_refused_and_saved_by_pickles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        CheckpointError, match=r"\['loss_fn'\], a torch.*set checkpoint=\{'pickles': True\}"
    ):
        _fit(tmp_path, 1, pickles=False)
    assert (
        "What WithLoss.on_save_checkpoint adds to checkpoints must be of plain types" in caplog.text
    )
    _fit(tmp_path, 1, pickles=True)
    saved = tmp_path / "it.ckpt"
    with pytest.raises(CheckpointError, match=r"checkpoint: \{pickles: true\}, or by export --pic"):
        _fit(tmp_path, 2, pickles=False, ckpt_path=saved)
    resumed = _fit(tmp_path, 2, pickles=True, ckpt_path=saved)
    assert resumed.delta == 0.25
    with pytest.raises(CheckpointError, match="or by export --pickles, if you trust it"):
        export(saved, tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match="--pickles reads weights alone"):
        export(saved, tmp_path / "plain.ckpt", pickles=True)
    export(saved, tmp_path / "it.pt", pickles=True)
    weights = WithLoss.load_from_checkpoint(saved, weights_only=False).state_dict()
    exported = torch.load(tmp_path / "it.pt")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
