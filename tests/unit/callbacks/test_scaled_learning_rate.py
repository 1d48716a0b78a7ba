"""What ScaledLearningRate takes, refuses and tells; what it does on several ranks is in
tests/multiprocess."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger

from lightning_distrec import ScaledLearningRate
from lightning_distrec.errors import ConfigError
from tests.support.counting_rates import CountingRates, batches
from tests.support.trainers import DEFAULTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic"}, "rule='cubic' is not known. Use one of 'linear', 'sqrt'"),
        ({"base_ranks": 0}, "base_ranks=0 must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 at least 0"),
    ],
)
def test_what_an_argument_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScaledLearningRate(**arguments)


def _fit(module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> None:
    pl.Trainer(callbacks=list(callbacks), **DEFAULTS | options).fit(module, batches())


def test_a_search_for_the_rate_is_refused() -> None:
    module = CountingRates()
    with pytest.raises(
        ConfigError, match="Run the finder without ScaledLearningRate, then set base_ranks"
    ):
        _fit(module, ScaledLearningRate(), LearningRateFinder())
    assert module.used == []


class RateIsATensor(CountingRates):
    """Both groups hold one tensor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [{"params": [weight]} for weight in self.weights], lr=torch.tensor(0.5)
        )


def test_a_rate_that_is_a_tensor_is_scaled_and_stays_the_same_tensor() -> None:
    module = RateIsATensor()
    _fit(module, ScaledLearningRate(base_ranks=4))
    assert module.used == [[0.125, 0.125]] * 4
    assert all(shown[0] is module.shown[0][0] for shown in module.shown)


class Breaks(CountingRates):
    """Its third step fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


def test_after_a_step_that_failed_the_groups_hold_their_own_rates() -> None:
    module, scaling = Breaks(), ScaledLearningRate(base_ranks=4)
    with pytest.raises(RuntimeError, match="broken"):
        _fit(module, scaling)
    assert [group["lr"] for group in module.optimizers().param_groups] == [1.0, 0.25]
    assert scaling.state_dict() == {"steps": [2]}


def test_the_loggers_get_the_rate_of_a_step_once_it_was_made(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    options = {
        "logger": logger,
        "log_every_n_steps": 1,
        "accumulate_grad_batches": 2,
        "max_epochs": 2,
    }
    module = CountingRates("ExponentialLR", "epoch")
    _fit(module, ScaledLearningRate(base_ranks=2), **options)
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as rows:
        logged = [row for row in csv.DictReader(rows) if row["scaled_learning_rate/group_0"]]
    rates = [(int(row["step"]), float(row["scaled_learning_rate/group_0"])) for row in logged]
    assert rates == [(0, 0.5), (1, 0.5), (2, 0.4), (3, 0.4)]
