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
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from lightning_distrec import PlanLogger
from lightning_distrec.errors import ConfigError
from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_ddp_trainer, make_trainer

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
        "images": getattr(logger, "images", {}),
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


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where the fits wrote, and what each of two ranks found."""
    folder = tmp_path_factory.mktemp("logs")
    logger = CSVLogger(str(folder / "csv"), name="run", version="v")
    calls = {
        "csv": (_fit, logger),
        "images": (_fit, TakesImages(), str(folder / "images")),
        "both": (_fit, [TakesImages(), CSVLogger(str(folder / "both"), name="run", version="v")]),
        "tried": (_try_out, str(folder / "tried")),
        "plain": (_fit_without_the_callback,),
    }
    return folder, run_each_on_ranks(calls, 2)


def test_the_page_and_its_pictures_lie_where_the_logger_writes(fits: Any) -> None:
    folder, _ = fits
    assert [name for name in _files(folder / "csv") if "plan" in name] == [
        "run/v/plan.html",
        "run/v/plan.json",
        *(f"run/v/plan_{name}.png" for name in PICTURES),
    ]
    text = (folder / "csv" / "run" / "v" / "plan.html").read_text()
    assert "<h1>3 tables over 2 ranks: all tables fit</h1>" in text
    assert re.search(r"Estimated time for tables, per step: [\d.]+ ms on", text)
    assert all(f"ebc.{name}" in text for name in ("wide", "narrow", "shared"))


def test_loggers_that_take_images_get_the_pictures_and_the_page_is_written(fits: Any) -> None:
    folder, ranks = fits
    assert _files(folder / "images") == ["plan.html"]
    images = ranks[0]["images"]["images"]
    assert sorted(images) == sorted(f"plan/{name}" for name in PICTURES)
    assert all(
        channels == 3 and kind == "uint8" and 128 < mean < 255
        for channels, kind, mean in images.values()
    )


def test_only_rank_zero_logs(fits: Any) -> None:
    _, ranks = fits
    assert ranks[1]["images"]["images"] == {}


def test_the_page_has_the_cost_that_the_planner_has_estimated(fits: Any) -> None:
    folder, ranks = fits
    message = re.search(
        r"for tables, per step: ([\d.]+) ms", (folder / "images" / "plan.html").read_text()
    )
    assert message is not None
    milliseconds = float(message[1])
    assert milliseconds == pytest.approx(ranks[0]["images"]["slowest"], rel=0.1)
    assert ranks[1]["images"]["slowest"] == ranks[0]["images"]["slowest"]


def test_a_logger_without_a_folder_leaves_the_page_to_the_next(fits: Any) -> None:
    folder, _ = fits
    assert [name for name in _files(folder / "both") if "plan" in name] == [
        "run/v/plan.html",
        "run/v/plan.json",
    ]


def test_a_trial_run_writes_nothing(fits: Any) -> None:
    folder, ranks = fits
    assert len(ranks[0]["tried"]["losses"]) == 1
    assert not (folder / "tried").exists()


def test_training_is_the_same_with_it(fits: Any) -> None:
    for actual in fits[1]:
        assert actual["csv"]["losses"] == actual["images"]["losses"] == actual["plain"]


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


def _ddp() -> list[str]:
    import warnings

    rank, _ = rank_and_num_ranks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_ddp_trainer(callbacks=[PlanLogger()])
        trainer.fit(seeded(ClickModel, torch.optim.SGD, {"lr": 0.1}), rank_loader(1, rank))
    return [str(warning.message) for warning in caught if "PlanLogger" in str(warning.message)]


def test_a_strategy_without_sharded_tables_is_reported_once() -> None:
    message = run_on_warm_ranks(_ddp, 2)
    assert len(message[0]) == 1
    assert message[0][0].startswith("PlanLogger: no tables are sharded, so there is no plan.")
    assert message[1] == []


def test_a_folder_that_is_none_of_this_machine_is_refused() -> None:
    trainer = pl.Trainer(**DEFAULTS, callbacks=[PlanLogger("s3://bucket/plan")])
    with pytest.raises(ConfigError, match="PlanLogger: 's3://bucket/plan' is not a local folder"):
        trainer.fit(seeded(ClickModel, torch.optim.SGD, {"lr": 0.1}), rank_loader(1, 0))


def _tensorboard(folder: str) -> list[str]:
    _fit(TensorBoardLogger(folder, name="run", version="v"))
    return []


def test_tensorboard_gets_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="no TensorBoard writer is installed")
    from tensorboardX.proto.event_pb2 import Event

    run_on_warm_ranks(_tensorboard, 2, str(tmp_path))
    file = next((tmp_path / "run" / "v").glob("events*"))
    data, tags = file.read_bytes(), {}
    while data:  # a record: length (8), its checksum (4), event, checksum (4)
        length = int.from_bytes(data[:8], "little")
        for value in Event.FromString(data[12 : 12 + length]).summary.value:
            if value.HasField("image"):
                tags[value.tag] = (value.image.width > 400, value.image.colorspace)
        data = data[16 + length :]
    assert tags == {f"plan/{name}": (True, 3) for name in PICTURES}
    assert (tmp_path / "run" / "v" / "plan.html").exists()
