"""The recipe on real data: sharded and unsharded runs reach the same AUROC; cpu.yaml runs as the
README says."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_distrec import TorchRecShardedStrategy
from recipes.movielens_dlrm.data import MovieLensDataModule
from recipes.movielens_dlrm.model import ClickModel
from tests.support.click_model import NO_OUTPUT
from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data_dir() -> str:
    """MovieLens-100k, downloaded where it is not here yet (2 MB)."""
    folder = ROOT / "data" / "movielens-100k"
    MovieLensDataModule(cache_dir=str(folder)).prepare_data()
    return str(folder)


def _train(sharded: bool, data_dir: str) -> dict[str, Any]:
    pl.seed_everything(1)
    model = ClickModel()
    model.configure_model()  # outside of the strategy, so that both runs start from the same rows
    strategy = TorchRecShardedStrategy() if sharded else "ddp"
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, **NO_OUTPUT)
    trainer.fit(model, MovieLensDataModule(data_dir=data_dir))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
def test_sharded_and_unsharded_runs_reach_the_same_validation_auroc(data_dir: str) -> None:
    sharded, unsharded = (run_on_ranks(_train, 2, mode, data_dir)[0] for mode in (True, False))
    assert sharded["val_auroc"] == pytest.approx(unsharded["val_auroc"], abs=0.002)
    assert sharded["val_log_loss"] == pytest.approx(unsharded["val_log_loss"], abs=0.002)
    print(
        f"validation AUROC: sharded {sharded['val_auroc']:.6f}, unsharded "
        f"{unsharded['val_auroc']:.6f}"
    )
    baseline = MovieLensDataModule(data_dir=data_dir)
    baseline.setup("fit")
    assert sharded["val_auroc"] > baseline.baseline("val").auroc + 0.02
