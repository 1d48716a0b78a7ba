"""Lightning's callbacks and profilers do over sharded tables what they do elsewhere, or are refused by name."""

import csv
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from tests.multiprocess.test_lifecycle import EvaluatedModel, make_trainer
from tests.multiprocess.test_loops import (
    OPTIMIZERS,
    USUAL,
    State,
    assert_equal,
    global_batches,
    loss_of,
    train_plain,
)
from tests.multiprocess.test_parity import limit_of
from tests.support.click_model import (
    FEATURES,
    NO_OUTPUT,
    ClickModel,
    bag_configs,
    largest_difference,
    rank_loader,
    seeded,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks


def make_ddp_trainer(**options: Any) -> pl.Trainer:
    """Return the trainer of `make_trainer`, but with Lightning's own strategy."""
    defaults = {"max_epochs": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0, "accelerator": "cpu"}
    return pl.Trainer(strategy="ddp", devices=rank_and_num_ranks()[1], **(NO_OUTPUT | defaults | options))


BOTH = {"sharded": make_trainer, "ddp": make_ddp_trainer}


class OwnLosses(EvaluatedModel):
    """Monitors the loss of its own rank."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", loss_of(self, batch), batch_size=len(batch["label"]))


def _stopped_early(kind: type) -> dict[str, dict[str, Any]]:
    rank, _ = rank_and_num_ranks()
    found: dict[str, dict[str, Any]] = {}
    for name, trainer_of in BOTH.items():
        model = seeded(kind, *OPTIMIZERS["SGD"])
        stopping = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
        trainer = trainer_of(max_epochs=30, callbacks=[stopping])
        trainer.fit(model, rank_loader(6, rank), rank_loader(2, rank, first=20))
        epochs = trainer.current_epoch, stopping.stopped_epoch
        found[name] = {"epochs": epochs, "best": float(stopping.best_score), "state": model.final_state}
    return found


@pytest.mark.parametrize("kind", [EvaluatedModel, OwnLosses])
def test_all_ranks_stop_early_where_ddp_stops(kind: type) -> None:
    found = run_on_ranks(_stopped_early, 2, kind)
    for rank in found:
        assert rank["sharded"]["epochs"] == rank["ddp"]["epochs"] == found[0]["ddp"]["epochs"]
        assert rank["sharded"]["best"] == pytest.approx(rank["ddp"]["best"], abs=1e-6)
    assert 1 < found[0]["sharded"]["epochs"][0] < 30
    assert max(largest_difference(found[0]["sharded"]["state"], found[0]["ddp"]["state"]).values()) <= 1e-6


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
            trainer_of(logger=logger, callbacks=[monitor], log_every_n_steps=1).fit(model, rank_loader(5, rank))
            states[f"{name} {place}"] = model.final_state
    return states


def test_learning_rates_are_logged_and_followed_as_under_ddp(tmp_path: Path) -> None:
    states = run_on_ranks(_monitored, 2, str(tmp_path))[0]
    for name in USUAL:
        logged = {}
        for place in BOTH:
            with open(tmp_path / f"{name}_{place}" / "metrics.csv") as file:
                rows = list(csv.DictReader(file))
            columns = [column for column in rows[0] if column.startswith("lr-")]
            logged[place] = {column: [float(row[column]) for row in rows if row[column]] for column in columns}
        first = OPTIMIZERS[name][1]["lr"]
        assert logged["sharded"] == logged["ddp"]
        tables = next(rates for column, rates in logged["sharded"].items() if column.endswith("tables"))
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
    found = run_on_ranks(_timed, 2)
    assert [steps for steps, _, _ in found] == [3, 3]
    assert all(0 < seconds < 60 for _, seconds, _ in found[1:])
    wanted = train_plain(seeded(ClickModel, *OPTIMIZERS["SGD"]), global_batches(3))
    assert max(largest_difference(found[0][2], wanted).values()) <= 1e-6


class Unfreezes(BaseFinetuning):
    """Lets the tables learn from epoch 1 on, at half the rate."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.ebc)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.ebc, optimizer, initial_denom_lr=2.0)


class LearnsInPart(ClickModel):
    """Gives its optimizer what learns at the start."""

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], **self.options)


def _finetuned(strategy: dict[str, Any]) -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in USUAL:
        model = seeded(LearnsInPart, *OPTIMIZERS[name])
        make_trainer(strategy, max_epochs=3, callbacks=[Unfreezes()]).fit(model, rank_loader(4, rank))
        states[name] = model.final_state
    return states


def finetune_plain(name: str) -> State:
    """Train the dense layers for an epoch and everything for two, by a plain loop."""
    model = seeded(LearnsInPart, *OPTIMIZERS[name])
    model.ebc.requires_grad_(False)
    optimizer = model.configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            model.ebc.requires_grad_(True)
            tables = list(model.ebc.parameters())
            optimizer.add_param_group({"params": tables, "lr": OPTIMIZERS[name][1]["lr"] / 2})
        for batch in global_batches(4):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
def test_tables_that_a_finetuning_callback_unfreezes_learn_from_then_on(cut: str) -> None:
    assert_equal(run_on_ranks(_finetuned, 2, {"sharding_types": [cut]})[0], finetune_plain)


class WithBackbone(ClickModel):
    """Has its tables in a backbone, which its optimizer does not know at the start."""

    def _build(self) -> None:
        self.ebc = None
        self.backbone = nn.ModuleDict({"tables": EmbeddingBagCollection(tables=bag_configs())})

    def configure_model(self) -> None:
        """Everything is built."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.backbone["tables"](features).values()).squeeze(-1)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.mlp.parameters(), **self.options)


def _backbone(strategy: dict[str, Any]) -> dict[str, tuple[State, list[float]]]:
    rank, _ = rank_and_num_ranks()
    found = {}
    for name in USUAL:
        model = seeded(WithBackbone, *OPTIMIZERS[name])
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.3)
        trainer = make_trainer(strategy, max_epochs=4, callbacks=[callback])
        trainer.fit(model, rank_loader(3, rank))
        found[name] = model.final_state, [group["lr"] for group in trainer.optimizers[0].param_groups]
    return found


def train_backbone(name: str) -> tuple[State, list[float]]:
    """Train the backbone from epoch 1 on, its rate doubled at every epoch until it is that of the rest."""
    model = seeded(WithBackbone, *OPTIMIZERS[name])
    model.backbone.requires_grad_(False)
    optimizer = model.configure_optimizers()
    full = OPTIMIZERS[name][1]["lr"]
    for epoch in range(4):
        if epoch == 1:
            model.backbone.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 0.3 * full})
        elif epoch > 1:
            optimizer.param_groups[1]["lr"] = min(full, 2 * optimizer.param_groups[1]["lr"])
        for batch in global_batches(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model.state_dict(), [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
def test_tables_in_a_backbone_are_finetuned_as_in_a_plain_loop(cut: str) -> None:
    # Not compared with DDP, which never averages the gradients of what was frozen when it began.
    found = run_on_ranks(_backbone, 2, {"sharding_types": [cut]})[0]
    start = seeded(WithBackbone, *OPTIMIZERS["SGD"]).state_dict()
    assert_equal({n: state for n, (state, _) in found.items()}, lambda n: train_backbone(n)[0], start)
    for name, (_, rates) in found.items():
        assert rates == pytest.approx(train_backbone(name)[1])


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


def test_profilers_report_every_batch_and_change_no_number(tmp_path: Path) -> None:
    found = run_on_ranks(_profiled, 2, str(tmp_path))[0]
    for title, state in found.items():
        name, kind = title.split()
        wanted = train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches(6))
        assert max(largest_difference(state, wanted).values()) <= limit_of(name), title
        for rank in range(2):
            report = (tmp_path / f"fit-{kind}_{name}-{rank}.txt").read_text()
            if kind == "SimpleProfiler":
                assert re.search(r"\|\s*run_training_batch\s*\|\s*[\d.e-]+\s*\|\s*6\s*\|", report)
                assert re.search(r"TorchRecShardedStrategy\.training_step\s*\|\s*[\d.e-]+\s*\|\s*6\s*\|", report)
            else:
                assert "Profile stats for: run_training_batch" in report
                assert "(training_step)" in report


class Sized(EvaluatedModel):
    """Has what the tuners write to."""

    batch_size = 2
    lr = 0.1

    def train_dataloader(self) -> Any:
        return rank_loader(4, rank_and_num_ranks()[0])


TUNERS: dict[str, tuple[type, str]] = {
    "LearningRateFinder": (LearningRateFinder, "UnsupportedError: LearningRateFinder trains some steps"),
    # Lightning's own words, before those of the strategy.
    "BatchSizeFinder": (
        BatchSizeFinder,
        "MisconfigurationException: The Batch size finder is not supported with distributed strategies",
    ),
}


def _tune(name: str, optimizer: str) -> None:
    model = seeded(Sized, *OPTIMIZERS[optimizer])

    def started(*_: Any) -> None:
        raise AssertionError("a step was made")

    model.training_step = started  # type: ignore[method-assign]
    make_trainer(callbacks=[TUNERS[name][0]()]).fit(model)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("name", TUNERS)
def test_callbacks_that_restore_optimizers_are_refused_before_the_first_step(name: str, optimizer: str) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_tune, 2, name, optimizer)
    assert "a step was made" not in str(failed.value)
    assert len(re.findall(f"^.*{TUNERS[name][1]}", str(failed.value), re.M)) == 2
