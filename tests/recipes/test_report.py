"""The recipes' report draws what was logged over steps, of which one epoch may have several
validations."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from recipes.report import Report, draw_curves, read_curves
from tests.support.click_model import NO_OUTPUT


def test_validations_within_one_epoch_are_points_of_their_own(tmp_path: Path) -> None:
    rows = [
        "epoch,step,train_loss,val_auroc",
        "0,99,,0.6",
        "0,199,,0.7",
        "0,299,,0.75",
        "0,399,,0.76",
        "0,399,0.5,",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    metrics = {"train_loss": "training loss", "val_auroc": "validation AUROC"}
    curves = read_curves(tmp_path / "metrics.csv", metrics)
    assert curves == {
        "train_loss": [(400, 0.5)],
        "val_auroc": [(100, 0.6), (200, 0.7), (300, 0.75), (400, 0.76)],
    }
    draw_curves(curves, metrics, {}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_trial_of_few_steps_that_logs_nothing_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = NO_OUTPUT | {
        "logger": CSVLogger(tmp_path),
        "callbacks": [Report({"train_loss": "training loss"})],
    }
    pl.Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, **settings).fit(BoringModel())
    assert "The curves were not drawn: nothing was logged." in capsys.readouterr().out
