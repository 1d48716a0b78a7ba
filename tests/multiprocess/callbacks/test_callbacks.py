"""Lightning's callbacks and profilers do over sharded tables what they do elsewhere, or are refused
by name."""

import csv
import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
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
    USUAL,
    State,
    global_batches,
    limit_of,
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


def _stopped_early(kind: type) -> dict[str, dict[str, Any]]:
    rank, _ = rank_and_num_ranks()
    actual: dict[str, dict[str, Any]] = {}
    for name, trainer_of in BOTH.items():
        model = seeded(kind, *OPTIMIZERS["SGD"])
        stopping = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
        trainer = trainer_of(max_epochs=30, callbacks=[stopping])
        trainer.fit(model, rank_loader(6, rank), rank_loader(2, rank, first=20))
        epochs = trainer.current_epoch, stopping.stopped_epoch
        actual[name] = {
            "epochs": epochs,
            "best": float(stopping.best_score),
            "state": model.final_state,
        }
    return actual


@pytest.fixture(scope="module")
def stopped() -> list[dict[str, Any]]:
    """What each rank found, by the kind of model."""
    return run_each_on_ranks(
        {kind.__name__: (_stopped_early, kind) for kind in (EvaluatedModel, OwnLosses)}, 2
    )


@pytest.mark.parametrize("kind", [EvaluatedModel, OwnLosses])
def test_all_ranks_stop_early_where_ddp_stops(stopped: list[dict[str, Any]], kind: type) -> None:
    actual = [rank_results[kind.__name__] for rank_results in stopped]
    for rank in actual:
        assert rank["sharded"]["epochs"] == rank["ddp"]["epochs"] == actual[0]["ddp"]["epochs"]
        assert rank["sharded"]["best"] == pytest.approx(rank["ddp"]["best"], abs=1e-6)
    assert 1 < actual[0]["sharded"]["epochs"][0] < 30
    assert (
        max(largest_difference(actual[0]["sharded"]["state"], actual[0]["ddp"]["state"]).values())
        <= 1e-6
    )


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
    for name in USUAL:
        for place, trainer_of in BOTH.items():
            model = seeded(Scheduled, *OPTIMIZERS[name])
            logger = CSVLogger(folder, name=f"{name}_{place}", version="")
            monitor = LearningRateMonitor(logging_interval="step")
            trainer_of(logger=logger, callbacks=[monitor], log_every_n_steps=1).fit(
                model, rank_loader(5, rank)
            )
            states[f"{name} {place}"] = model.final_state
    return states


def test_learning_rates_are_logged_and_followed_as_under_ddp(tmp_path: Path) -> None:
    states = run_on_warm_ranks(_monitored, 2, str(tmp_path))[0]
    for name in USUAL:
        logged = {}
        for place in BOTH:
            with open(tmp_path / f"{name}_{place}" / "metrics.csv") as file:
                rows = list(csv.DictReader(file))
            columns = [column for column in rows[0] if column.startswith("lr-")]
            logged[place] = {
                column: [float(row[column]) for row in rows if row[column]] for column in columns
            }
        first = OPTIMIZERS[name][1]["lr"]
        assert logged["sharded"] == logged["ddp"]
        tables = next(
            rates for column, rates in logged["sharded"].items() if column.endswith("tables")
        )
        assert tables == pytest.approx([first * 0.8**step for step in range(5)])
        assert len(logged["sharded"]) == 2
        difference = largest_difference(states[f"{name} sharded"], states[f"{name} ddp"])
        assert max(difference.values()) <= limit_of(name), (name, difference)


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


def _profiled(folder: str) -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in USUAL:
        for kind in (SimpleProfiler, AdvancedProfiler):
            model = seeded(EvaluatedModel, *OPTIMIZERS[name])
            profiler = kind(dirpath=folder, filename=f"{kind.__name__}_{name}")
            make_trainer(profiler=profiler).fit(model, rank_loader(6, rank), rank_loader(2, rank))
            states[f"{name} {kind.__name__}"] = model.final_state
    return states


@pytest.mark.slow
def test_profilers_report_every_batch_and_change_no_number(tmp_path: Path) -> None:
    actual = run_on_warm_ranks(_profiled, 2, str(tmp_path))[0]
    for title, state in actual.items():
        name, kind = title.split()
        expected = train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches(6))
        assert max(largest_difference(state, expected).values()) <= limit_of(name), title
        for rank in range(2):
            report = (tmp_path / f"fit-{kind}_{name}-{rank}.txt").read_text()
            if kind == "SimpleProfiler":
                assert re.search(r"\|\s*run_training_batch\s*\|\s*[\d.e-]+\s*\|\s*6\s*\|", report)
                assert re.search(
                    r"TorchRecShardedStrategy\.training_step\s*\|\s*[\d.e-]+\s*\|\s*6\s*\|", report
                )
            else:
                assert "Profile stats for: run_training_batch" in report
                assert "(training_step)" in report


class Sized(EvaluatedModel):
    """Has what the tuners write to."""

    batch_size = 2
    lr = 0.1

    def train_dataloader(self) -> Any:
        return rank_loader(4, rank_and_num_ranks()[0])


def _search(strategy: str, optimizer: str) -> dict[str, Any]:
    """Look for a learning rate over 20 steps, then train on."""
    model = seeded(Searched, *OPTIMIZERS[optimizer])
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


class Searched(Sized):
    """Learns at the rate that was found."""

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **{**self.options, "lr": self.lr})

    def on_train_end(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return rank_loader(22, rank_and_num_ranks()[0])


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_the_learning_rate_finder_finds_and_restores_what_it_does_under_ddp(optimizer: str) -> None:
    calls = {strategy: (_search, strategy, optimizer) for strategy in BOTH}
    for actual in run_each_on_ranks(calls, 2):
        sharded, ddp = actual["sharded"], actual["ddp"]
        assert len(ddp["losses"]) == 42
        assert sharded["losses"] == pytest.approx(ddp["losses"], abs=2e-5)
        assert sharded["tried"]["lr"] == ddp["tried"]["lr"]
        assert sharded["tried"]["loss"] == pytest.approx(ddp["tried"]["loss"], abs=2e-5)
        assert sharded["suggested"] == ddp["suggested"] != 0.1
        assert sharded["left"] == []


def _tune(optimizer: str) -> str:
    model = seeded(Sized, *OPTIMIZERS[optimizer])

    def started(*_: Any) -> None:
        raise AssertionError("a step was made")

    model.training_step = started  # type: ignore[method-assign]
    try:
        make_trainer(callbacks=[BatchSizeFinder()]).fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_lightning_refuses_the_batch_size_finder_before_the_first_step() -> None:
    for message in run_on_warm_ranks(_tune, 2, "SGD"):
        assert message.startswith(
            "MisconfigurationException: The Batch size finder is not supported with distributed "
            "strategies"
        )
