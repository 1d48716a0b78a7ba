"""The recipe on real data: sharded and unsharded runs reach the same AUROC; cpu.yaml runs as the
README says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_distrec import TorchRecShardedStrategy
from recipes.movielens_dlrm.data import MovieLensDataModule
from recipes.movielens_dlrm.model import ClickModel
from tests.support.click_model import NO_OUTPUT
from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS
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


def test_cpu_yaml_trains_and_reports_what_it_did(data_dir: str, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "lightning-distrec"
    arguments = [
        *("--config", "recipes/movielens_dlrm/cpu.yaml", "--trainer.max_epochs=1"),
        *("--trainer.limit_train_batches=20", "--trainer.limit_val_batches=5"),
        f"--trainer.logger.init_args.save_dir={tmp_path}",
        f"--data.init_args.data_dir={data_dir}",
    ]
    done = subprocess.run(
        [str(script), "fit", *arguments],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Embedding tables over 2 ranks" in done.stdout
    assert "mean-rates baseline" in done.stdout
    folder = tmp_path / "movielens_dlrm" / "version_0"
    assert f"Outputs in {folder}" in done.stdout
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
def test_a_missing_folder_is_one_clear_error(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "lightning-distrec"
    arguments = [
        "--config",
        "recipes/movielens_dlrm/cpu.yaml",
        f"--data.init_args.data_dir={tmp_path}/nothing",
    ]
    done = subprocess.run(
        [str(script), "fit", *arguments, f"--trainer.logger.init_args.save_dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert f"lightning-distrec: {tmp_path}/nothing: no such folder" in done.stderr
    assert "Traceback" not in done.stderr
