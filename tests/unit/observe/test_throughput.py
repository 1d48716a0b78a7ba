"""Throughput says what the clock says, whatever the strategy."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchrec import KeyedJaggedTensor

from lightning_distrec import Throughput, spans
from lightning_distrec.errors import ConfigError
from lightning_distrec.observe import steps
from lightning_distrec.observe.throughput import SampleCounter
from lightning_distrec.spans import BACKWARD, FORWARD, WAIT_DATA, WAIT_OUTPUT_DIST, emit, span
from tests.support.trainers import one_process_trainer


class Job(pl.LightningModule):
    """Spends known times: 1 s fetching, 4 s in forward of which 3 s wait, 2 s in backward, 3 s
    elsewhere."""

    def __init__(self, sleep: Callable[[float], None], tells: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.sleep, self.tells = sleep, tells
        self.bar: list[Any] = []

    def _pass(self, name: str, seconds: float) -> None:
        if self.tells:
            with span(name):
                self.sleep(seconds)
        else:
            self.sleep(seconds)

    def on_train_batch_start(self, *_: Any) -> None:
        self._pass(WAIT_DATA, 1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        begin = steps.time.perf_counter()
        self.sleep(1.0)
        self._pass(WAIT_OUTPUT_DIST, 3.0)
        if self.tells:
            emit(FORWARD, begin, steps.time.perf_counter())
        self._pass(BACKWARD, 2.0)
        self.sleep(3.0)
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.bar.append(self.trainer.progress_bar_metrics.get("samples/s"))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._pass(FORWARD, 100.0)

    def on_train_epoch_end(self) -> None:
        self.sleep(1000.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Pass seconds on a clock that else stands still."""
    clock = SimpleNamespace(seconds=100.0)
    time = SimpleNamespace(perf_counter=lambda: clock.seconds, process_time=lambda: clock.seconds)
    monkeypatch.setattr(spans, "time", time)
    monkeypatch.setattr(steps, "time", time)

    def sleep(seconds: float) -> None:
        clock.seconds += seconds

    return sleep


def loader(batches: int, size: int = 5) -> DataLoader:
    return DataLoader([torch.ones(size, 1) for _ in range(batches)], batch_size=None)


def read(folder: Path) -> list[dict[str, float]]:
    with open(next(folder.rglob("metrics.csv"))) as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def test_the_loggers_get_samples_per_second_and_the_split_of_a_step(
    sleep: Callable[[float], None], tmp_path: Path
) -> None:
    for tells in (True, False):
        model, folder = Job(sleep, tells), tmp_path / str(tells)
        options = {"logger": CSVLogger(folder), "callbacks": Throughput(), "log_every_n_steps": 2}
        one_process_trainer(**options).fit(model, loader(5))
        rows = read(folder)
        assert [row.pop("step") for row in rows] == [1, 3]
        expected = {"samples_per_second": 0.5, "step_ms": 10_000}
        if tells:
            expected |= {
                "wait_for_data_ms": 1000,
                "wait_for_output_dist_ms": 3000,
                "forward_ms": 1000,
                "backward_ms": 2000,
                "other_ms": 3000,
            }
        for row in rows:
            assert row == pytest.approx({f"throughput/{name}": v for name, v in expected.items()})
        assert model.bar == ["0.50"] * 5


def test_validation_and_what_passes_between_epochs_are_in_no_step(
    sleep: Callable[[float], None],
) -> None:
    callback = Throughput()
    trainer = one_process_trainer(
        max_epochs=3, callbacks=callback, val_check_interval=1, num_sanity_val_steps=0
    )
    trainer.fit(Job(sleep), loader(4), loader(2))
    assert callback.numbers["throughput/step_ms"] == pytest.approx(10_000)
    assert callback.numbers["throughput/forward_ms"] == pytest.approx(1000)


def test_a_failed_fit_leaves_no_listener_and_a_second_fit_starts_over(
    sleep: Callable[[float], None],
) -> None:
    callback = Throughput()
    broken = Job(sleep)
    broken.on_before_zero_grad = lambda optimizer: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        one_process_trainer(callbacks=callback).fit(broken, loader(2))
    assert spans._subscribers == []
    one_process_trainer(callbacks=callback).fit(Job(sleep), loader(1))
    assert callback.numbers["throughput/step_ms"] == pytest.approx(10_000)
    assert spans._subscribers == []


@dataclass
class Clicks:
    """A batch as torchrec's examples have it."""

    ids: KeyedJaggedTensor
    label: Tensor


def jagged(samples: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(6 * samples), lengths=torch.full((2 * samples,), 3)
    )


@pytest.mark.parametrize(
    ("batch", "path", "samples"),
    [
        ((torch.ones(4, 2), torch.ones(4)), None, 4),
        ({"weight": torch.tensor(1.0), "x": [torch.ones(4)]}, None, 4),
        ({"ids": torch.ones(9), "label": torch.ones(4)}, None, None),
        ({"dense": torch.ones(9), "ids": jagged(4)}, None, 4),
        (Clicks(jagged(4), torch.ones(4)), None, 4),
        ((torch.ones(9), Clicks(jagged(4), torch.ones(3))), "1.label", 3),
        ((torch.ones(9), Clicks(jagged(4), torch.ones(3))), "1.ids", 4),
        ("text", None, None),
    ],
)
def test_samples_of_a_batch_are_counted(batch: Any, path: str | None, samples: int | None) -> None:
    assert SampleCounter(path).count(batch) == samples


def test_ragged_ids_do_not_count_as_samples_where_the_loader_has_a_batch_size() -> None:
    batches = [
        {"ids": torch.ones(size * 9), "lengths": torch.ones(2 * size), "label": torch.ones(size)}
        for size in (4, 3)
    ]
    counter = SampleCounter()
    counter.start(DataLoader([0], batch_size=4))
    assert [counter.count(batch) for batch in batches] == [4, 3]
    counter.start(DataLoader([0], batch_sampler=BatchSampler([0], 4, drop_last=False)))
    assert [counter.count(batch) for batch in batches] == [4, 3]
    counter.start(DataLoader([0], batch_size=None), SimpleNamespace(batch_size=4))
    assert [counter.count(batch) for batch in batches] == [4, 3]


def test_a_place_that_the_batch_does_not_have_is_refused_with_a_suggestion() -> None:
    words = "samples_from='labels': there is no 'labels' in a dict of ids, label.*mean 'label'"
    with pytest.raises(ConfigError, match=words):
        SampleCounter("labels").count({"ids": torch.ones(9), "label": torch.ones(4)})
    words = "there is no '2' in a tuple of 1: name a position from 0."
    with pytest.raises(ConfigError, match=words):
        SampleCounter("2").count((torch.ones(9),))
