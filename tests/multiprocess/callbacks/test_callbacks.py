"""Lightning's callbacks and profilers do over sharded tables what they do elsewhere, or are refused
by name."""

import csv
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.support.click_model import (
    ClickModel,
    EvaluatedModel,
    largest_difference,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import (
    OPTIMIZERS,
    State,
    global_batches,
    loss_of,
    train_plain,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_ddp_trainer, make_trainer

BOTH = {"sharded": make_trainer, "ddp": make_ddp_trainer}


class OwnLosses(EvaluatedModel):
    """Monitors the loss of its own rank."""

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("val_loss", loss_of(self, batch), batch_size=len(batch["label"]))


def _stopped_early() -> dict[str, dict[str, Any]]:
    rank, _ = rank_and_num_ranks()
    actual: dict[str, dict[str, Any]] = {}
    for name, trainer_of in BOTH.items():
        model = seeded(OwnLosses, *OPTIMIZERS["SGD"])
        stopping = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
        trainer = trainer_of(max_epochs=30, callbacks=[stopping])
        trainer.fit(model, rank_loader(6, rank), rank_loader(2, rank, first=20))
        actual[name] = {
            "epochs": (trainer.current_epoch, stopping.stopped_epoch),
            "best": float(stopping.best_score),
            "state": model.final_state,
        }
    return actual


def test_all_ranks_stop_early_where_ddp_stops() -> None:
    actual = run_on_warm_ranks(_stopped_early, 2)
    for rank in actual:
        assert rank["sharded"]["epochs"] == rank["ddp"]["epochs"] == actual[0]["ddp"]["epochs"]
        assert rank["sharded"]["best"] == pytest.approx(rank["ddp"]["best"], abs=1e-6)
    sharded, ddp = actual[0]["sharded"], actual[0]["ddp"]
    assert 1 < sharded["epochs"][0] < 30
    assert max(largest_difference(sharded["state"], ddp["state"]).values()) <= 1e-6


class Scheduled(ClickModel):
    """Two param groups under a scheduler that steps with every batch."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.ebc.parameters()), "name": "tables"},
            {"params": list(self.mlp.parameters()), "lr": 0.1, "name": "dense"},
        ]
        optimizer = self.optimizer(groups, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _monitored(folder: str) -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for place, trainer_of in BOTH.items():
        model = seeded(Scheduled, *OPTIMIZERS["Adagrad"])
        logger = CSVLogger(folder, name=place, version="")
        monitor = LearningRateMonitor(logging_interval="step")
        trainer = trainer_of(logger=logger, callbacks=[monitor], log_every_n_steps=1)
        trainer.fit(model, rank_loader(5, rank))
        states[place] = model.final_state
    return states


def test_learning_rates_are_logged_and_followed_as_under_ddp(tmp_path: Path) -> None:
    states = run_on_warm_ranks(_monitored, 2, str(tmp_path))[0]
    logged: dict[str, dict[str, list[float]]] = {}
    for place in BOTH:
        with open(tmp_path / place / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        columns = [column for column in rows[0] if column.startswith("lr-")]
        logged[place] = {
            column: [float(row[column]) for row in rows if row[column]] for column in columns
        }
    assert logged["sharded"] == logged["ddp"]
    assert len(logged["sharded"]) == 2
    (tables,) = [rates for name, rates in logged["sharded"].items() if name.endswith("tables")]
    first = OPTIMIZERS["Adagrad"][1]["lr"]
    assert tables == pytest.approx([first * 0.8**step for step in range(5)])
    assert max(largest_difference(states["sharded"], states["ddp"]).values()) <= 1e-5


def _timed() -> tuple[int, float, State]:
    rank, _ = rank_and_num_ranks()
    model = seeded(ClickModel, *OPTIMIZERS["SGD"])
    timer = Timer(duration=timedelta(hours=1), interval="step")

    def run_late(batch: Any, batch_idx: int) -> None:
        if (batch_idx, rank) == (2, 0):
            timer._offset = 7200  # two hours later on rank 0, whose clock decides

    model.on_train_batch_start = run_late  # type: ignore[method-assign]
    trainer = make_trainer(max_epochs=-1, callbacks=[timer])
    trainer.fit(model, rank_loader(5, rank))
    return trainer.global_step, timer.time_elapsed("train"), model.final_state


def test_a_timer_stops_all_ranks_at_the_same_step() -> None:
    actual = run_on_warm_ranks(_timed, 2)
    assert [steps for steps, _, _ in actual] == [3, 3]
    assert all(0 < seconds < 60 for _, seconds, _ in actual[1:])
    expected = train_plain(seeded(ClickModel, *OPTIMIZERS["SGD"]), global_batches(3))
    assert max(largest_difference(actual[0][2], expected).values()) <= 1e-6


class Searched(EvaluatedModel):
    """Learns at the rate that was found."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **{**self.options, "lr": self.lr})

    def on_train_end(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return rank_loader(22, rank_and_num_ranks()[0])


def _search(strategy: str) -> dict[str, Any]:
    """Look for a learning rate over 20 steps, then train on."""
    model = seeded(Searched, *OPTIMIZERS["Adagrad"])
    finder = LearningRateFinder(
        min_lr=1e-3, max_lr=0.5, num_training_steps=20, early_stop_threshold=None
    )
    trainer = BOTH[strategy](callbacks=[finder], default_root_dir=tempfile.mkdtemp())
    trainer.fit(model)
    return {
        "losses": model.losses,
        "suggested": model.lr,
        "tried": finder.optimal_lr.results,
        "left": list(Path(trainer.default_root_dir).glob(".*")),
    }


def test_the_learning_rate_finder_finds_and_restores_what_it_does_under_ddp() -> None:
    calls = {strategy: (_search, strategy) for strategy in BOTH}
    for actual in run_each_on_ranks(calls, 2):
        sharded, ddp = actual["sharded"], actual["ddp"]
        assert len(ddp["losses"]) == 42
        assert sharded["losses"] == pytest.approx(ddp["losses"], abs=2e-5)
        assert sharded["tried"]["lr"] == ddp["tried"]["lr"]
        assert sharded["tried"]["loss"] == pytest.approx(ddp["tried"]["loss"], abs=2e-5)
        assert sharded["suggested"] == ddp["suggested"] != 0.1
        assert sharded["left"] == []
