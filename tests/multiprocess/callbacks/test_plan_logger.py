"""PlanLogger writes the plan of a fit once, on rank 0, where the loggers write, and hands them its
pictures."""

import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from lightning_distrec import PlanLogger
from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

PICTURES = ["memory", "tables", "time", "traffic", "traffic_matrix"]


class TakesImages(Logger):
    """A logger of the kind that has `log_image`, which keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "takes_images"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return None

    def log_hyperparams(self, *args: Any, **options: Any) -> None: ...

    def log_metrics(self, *args: Any, **options: Any) -> None: ...

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.images[key] = (images[0].shape[2], str(images[0].dtype), float(images[0].mean()))


class SeesCost(Callback):
    """Keeps what the planner has reckoned for the slowest rank."""

    critical_path: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan = trainer.strategy.run_tables.plan  # type: ignore[attr-defined]
        self.critical_path = plan.cost.critical_path


def _fit(logger: Any, path: str | None = None, **options: Any) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    sees = SeesCost()
    callbacks = [sees, PlanLogger(path)]
    trainer = make_trainer(callbacks=callbacks, logger=logger, **options)
    trainer.fit(model, rank_loader(3, rank))
    return {
        "losses": model.losses,
        "images": logger[0].images if isinstance(logger, list) else {},
        "slowest": sees.critical_path,
    }


def _fit_without_the_callback() -> list[float]:
    rank, _ = rank_and_num_ranks()
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    make_trainer().fit(model, rank_loader(3, rank))
    return model.losses


def _try_out(folder: str) -> dict[str, Any]:
    return _fit(False, folder, fast_dev_run=True)


def _files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_loggers_get_the_page_and_its_pictures_and_training_is_the_same(tmp_path: Path) -> None:
    parts = [CSVLogger(str(tmp_path / name), name="run", version="v") for name in ("csv", "both")]
    first, second = run_each_on_ranks(
        {
            "csv": (_fit, parts[0]),
            "both": (_fit, [images := TakesImages(), parts[1]]),
            "tried": (_try_out, str(tmp_path / "tried")),
            "plain": (_fit_without_the_callback,),
        },
        2,
    )
    assert images.images == {}, "ranks have copies"
    page = ["run/v/plan.html", "run/v/plan.json"]
    assert [name for name in _files(tmp_path / "csv") if "plan" in name] == [
        *page,
        *(f"run/v/plan_{name}.png" for name in PICTURES),
    ]
    # A logger without a folder leaves the page to the next, and takes the pictures.
    assert [name for name in _files(tmp_path / "both") if "plan" in name] == page
    assert sorted(first["both"]["images"]) == sorted(f"plan/{name}" for name in PICTURES)
    for channels, kind, mean in first["both"]["images"].values():
        assert (channels, kind) == (3, "uint8")
        assert 128 < mean < 255
    assert second["both"]["images"] == {}
    text = (tmp_path / "csv" / "run" / "v" / "plan.html").read_text()
    assert "<h1>3 tables over 2 ranks: all tables fit</h1>" in text
    assert all(f"ebc.{name}" in text for name in ("wide", "narrow", "shared"))
    estimated = re.search(r"Estimated time for tables, per step: ([\d.]+) ms on", text)
    assert estimated is not None
    assert float(estimated[1]) == pytest.approx(first["csv"]["slowest"], rel=0.1)
    assert second["csv"]["slowest"] == first["csv"]["slowest"]
    assert len(first["tried"]["losses"]) == 1, "a trial run"
    assert not (tmp_path / "tried").exists()
    for rank in (first, second):
        assert rank["csv"]["losses"] == rank["both"]["losses"] == rank["plain"]


def test_a_folder_that_cannot_be_written_fails_all_ranks_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begin = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_fit, 2, False, str(tmp_path / "file" / "plan"))
    message = str(failed.value)
    assert "--- rank 0 raised" in message
    assert f"ConfigError: PlanLogger cannot write to '{tmp_path / 'file' / 'plan'}'" in message
    assert "was not done" not in message
    assert time.monotonic() - begin < 120
