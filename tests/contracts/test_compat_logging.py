"""`self.log` in training steps gives loggers, callbacks and progress bars the same bits, at less
Python."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_distrec._compat import lightning_logging as _lightning_logging
from tests.support.ranks import run_on_ranks


class Model(pl.LightningModule):
    """Logs values of every kind, each with the options that change what is kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.auroc, self.curve, self.mean = BinaryAUROC(), BinaryAUROC(thresholds=5), MeanMetric()
        self.both = MetricCollection({"a": BinaryAccuracy(), "b": BinaryAccuracy(threshold=0.2)})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).sum()
        scores, clicks = batch[:, 0].sigmoid(), (batch[:, 1] > 0).long()
        for metric in (self.auroc, self.curve):
            metric(scores, clicks)
        self.mean.update(scores)
        self.log("loss", loss, prog_bar=True)
        self.log("of_both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("of_epoch", loss[None], on_step=False, on_epoch=True)
        self.log("counted", loss, on_epoch=True, batch_size=3 + batch_idx)
        for reduce_fx in ("min", "max", "sum", torch.mean):
            self.log(f"reduced_{reduce_fx}", loss.double(), on_epoch=True, reduce_fx=reduce_fx)
        self.log("number", 0.1 * batch_idx, on_epoch=True)
        self.log("index", batch_idx)
        self.log("integers", torch.tensor(batch_idx), on_epoch=True)
        self.log("half", loss.half(), on_epoch=True, logger=False)
        self.log("graph", loss, enable_graph=True)
        self.log("sent", loss, on_step=False, on_epoch=True, sync_dist=True)
        changes = torch.ones(())
        self.log("changes", changes)
        changes += 1
        if batch_idx % 2:
            self.log("sometimes", loss if batch_idx % 3 else 2.0, on_epoch=True)
        self.log("auroc", self.auroc, on_step=True, on_epoch=True, prog_bar=True)
        self.log("curve", self.curve, on_step=False, on_epoch=True)
        self.log("mean", self.mean)
        self.log_dict(self.both(scores, clicks), on_epoch=True)
        self.log_dict({"x": loss, "y": loss * 2})
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.log("end", 2.0, on_epoch=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(pl.Callback):
    """Notes what callbacks, loggers and bars find after each step and each epoch."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def note(self, trainer: pl.Trainer, *arguments: Any) -> None:
        connector = trainer._logger_connector
        seen = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        retained = (
            connector._callback_metrics,
            connector._logged_metrics,
            connector._progress_bar_metrics,
        )
        for metrics in (*seen, *retained):
            as_numbers = {
                k: (v.dtype, v.item()) if isinstance(v, Tensor) else v for k, v in metrics.items()
            }
            self.found.append(sorted(as_numbers.items()))

    on_train_batch_start = on_train_batch_end = on_train_epoch_end = on_validation_end = (
        on_fit_end
    ) = note


def _fit(lean: bool, folder: Path) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, seen = Model(), Seen()
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[seen], logger=CSVLogger(folder), log_every_n_steps=2,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=1, val_check_interval=3,
    )  # fmt: skip
    data = torch.linspace(-2, 2, 28).reshape(14, 2)[torch.randperm(14)]
    with _lightning_logging.log_at_less_python(trainer) if lean else nullcontext():
        trainer.fit(model, DataLoader(data, batch_size=2), DataLoader(data[:2]))
    written = Path(trainer.logger.log_dir, "metrics.csv").read_text()  # type: ignore[union-attr,arg-type]
    return seen.found, written, model.layer.weight.tolist()


def test_a_fit_logs_the_same_bits_everywhere(tmp_path: Path) -> None:
    distrec, stock = _fit(True, tmp_path / "ours"), _fit(False, tmp_path / "theirs")
    for step, (actual, expected) in enumerate(zip(distrec[0], stock[0], strict=True)):
        assert repr(actual) == repr(expected), step  # by repr: NaN is NaN
    assert distrec[1:] == stock[1:]


OPTIONS: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_steps": 6,
}  # fmt: skip


class Logs(pl.LightningModule):
    """Logs what a function logs."""

    def __init__(self, logs: Any) -> None:
        super().__init__()
        self.layer, self.logs = nn.Linear(2, 1), logs

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.logs(self, batch_idx)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _wrong(number: int, wrong: Any) -> Any:
    return lambda module, index: (
        module.log("x", torch.zeros(())) if index < number else wrong(module)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda module: module.log("x", torch.zeros(2)),
        lambda module: module.log("x", torch.zeros(()), prog_bar=True),
        lambda module: module.log("x", "text"),
        lambda module: module.log("x", torch.zeros(()), on_step=False, on_epoch=False),
        lambda module: module.log("x/dataloader_idx_0", torch.zeros(())),
        lambda module: module.log("x", {"nested": {"y": 1}}),
    ],
)
def test_a_wrong_call_after_right_ones_raises_as_upstream_s(wrong: Any) -> None:
    raised = []
    for lean in (True, False):
        trainer = pl.Trainer(**OPTIONS)
        patches = _lightning_logging.log_at_less_python(trainer) if lean else nullcontext()
        with patches, pytest.raises((MisconfigurationException, ValueError)) as info:
            trainer.fit(Logs(_wrong(3, wrong)), DataLoader(torch.ones(6, 2)))
        assert trainer.global_step == 3
        raised.append((type(info.value), str(info.value)))
    assert raised[0] == raised[1]


class Reduced(pl.LightningModule):
    """Logs what ranks reduce, and what they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(2, 1), MeanMetric()
        self.calls: list[dict[str, tuple[str, bool]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).sum()
        self.mean.update(loss.detach())
        self.log("step", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.log("local", loss, on_step=False, on_epoch=True)
        self.log("zero", loss, on_step=False, on_epoch=True, sync_dist=True, rank_zero_only=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.calls.append({})
        self.log("late", 1.0, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _reduced() -> list[dict[str, tuple[str, bool]]]:
    model = Reduced()
    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="ddp", max_epochs=1, **options)

    def look() -> None:
        model.calls.append(_lightning_logging.reduced_values(trainer))
        _lightning_logging.reorder_reduced_values(
            trainer, sorted(_lightning_logging.reduced_values(trainer))
        )

    with _lightning_logging.before_values_are_reduced(trainer, look):
        trainer.fit(model, DataLoader([torch.ones(2)] * 2, batch_size=1))
    return model.calls


def test_reduced_values_are_those_that_ranks_reduce_and_are_known_before_they_are() -> None:
    [(batches, hook, end)] = run_on_ranks(_reduced, 1)
    assert list(batches.values()) == [("step", True), ("epoch", False), ("metric", False)]
    assert hook == {}
    names = [name for name, _ in end.values()]
    assert names == ["epoch", "metric", "step", "late"], (
        "what was logged before is in the order that was asked for"
    )
