"""One contract for every private name of lightning's loggers."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import litlogger, mlflow, utilities, wandb

from lightning_distrec._compat import lightning_checkpoints as _lightning_checkpoints
from lightning_distrec.checkpoint.save import wait_for_checkpoint
from tests.support.checkpoint_folders import by_rows, write_folder


def test_lightning_finds_our_folders_among_the_checkpoints_to_upload(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "it.ckpt", {"loops": None, "state_dict": {"w": by_rows(torch.ones(2, 2))}}
    )
    others_values = tmp_path / "sharded.ckpt"
    others_values.mkdir()
    keep = ModelCheckpoint(tmp_path)
    keep.best_model_path, keep.best_model_score, keep.last_model_path = (
        str(path),
        torch.tensor(2.0),
        str(others_values),
    )
    assert utilities._scan_checkpoints(keep, {}) == []
    scan = wandb.WandbLogger._scan_and_log_checkpoints
    with _lightning_checkpoints.upload_folders_too(wait_for_checkpoint):
        ((time, actual, score, tag),) = utilities._scan_checkpoints(keep, {})
        assert (actual, score, tag) == (str(path), 2.0, "best")
        assert utilities._scan_checkpoints(keep, {actual: time}) == []
        assert wandb.WandbLogger._scan_and_log_checkpoints is not scan
    assert all(
        module._scan_checkpoints is utilities._scan_checkpoints
        for module in (mlflow, wandb, litlogger)
    )
