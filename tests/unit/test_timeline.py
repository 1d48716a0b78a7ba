"""The picture of a few steps shows what was told about them, where it was told."""

import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import Timeline, spans
from lightning_distrec.callbacks.steps import Step
from lightning_distrec.callbacks.timeline import draw
from lightning_distrec.errors import ConfigError
from lightning_distrec.spans import BACKWARD, FORWARD, INPUT_DIST, OUTPUT_DIST, WAIT_OUTPUT_DIST, Span, span
from tests.unit.test_throughput import QUIET

STEPS = [
    Step(10.0, 10.010, 0.010, [Span(WAIT_OUTPUT_DIST, 10.002, 10.003), Span(FORWARD, 10.0, 10.005)]),
    Step(
        *(10.010, 10.030, 0.020),
        [
            Span(INPUT_DIST, 9.0, 10.011),
            Span(OUTPUT_DIST, 10.012, 10.016),
            Span(OUTPUT_DIST, 10.014, 10.018),
            Span(BACKWARD, 10.015, 10.030),
            Span("news", 10.011, 10.012),
        ],
    ),
]
LATER = [Span(INPUT_DIST, 10.020, 10.050), Span(FORWARD, 10.031, 10.040)]


def bars_of(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """Return lane -> the begins and ends of its bars, in ms."""
    axes = figure.axes[0]
    names = {tick: label.get_text() for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    bars: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            name = next(name for tick, name in names.items() if abs(tick - (box.y0 + box.y1) / 2) < 0.5)
            bars[name].append((round(box.x0, 6), round(box.x1, 6)))
    return bars


def test_each_lane_has_bars_where_its_spans_are() -> None:
    assert bars_of(draw(STEPS, 20, LATER)) == {
        "forward": [(0, 2), (3, 5)],  # the wait is not part of it
        "backward": [(15, 30)],
        "input dist": [(0, 11), (20, 30)],  # what began before and ended after reaches to the edge
        "output dist": [(12, 16), (14, 18)],
        "wait for output dist": [(2, 3)],
        "news": [(11, 12)],  # a name of tomorrow gets a lane of its own
    }


def test_bars_that_overlap_are_drawn_one_below_the_other() -> None:
    collections = draw(STEPS, 20, LATER).axes[0].collections
    boxes = [path.get_extents() for collection in collections for path in collection.get_paths()]
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            assert one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0


def test_the_title_and_the_margin_say_how_long_a_step_and_its_parts_take() -> None:
    axes = draw(STEPS, 20, LATER).axes[0]
    assert axes.get_title(loc="left") == "Rank 0, steps 20 to 21: 15.0 ms a step, 0.5 ms of it waiting"
    said = [text.get_text() for text in axes.texts]
    assert said[:5] == ["2.0", "7.5", "10.5", "4.0", "0.5"]
    assert {"step 20", "step 21", "ms a step"} <= set(said)


class Job(pl.LightningModule):
    """Tells its forward, and counts its steps."""

    def __init__(self, tells: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.tells, self.steps = tells, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.tells:
            with span(FORWARD):
                return self.layer(batch).sum()
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(callback: Timeline, batches: int, tells: bool = True) -> None:
    loader = DataLoader([torch.ones(2, 1) for _ in range(batches)], batch_size=None)
    pl.Trainer(**QUIET, logger=False, callbacks=callback).fit(Job(tells), loader)
    assert spans._subscribers == []


@pytest.mark.parametrize("batches", [10, 4])
def test_the_picture_is_written_also_where_the_fit_is_shorter(tmp_path: Path, batches: int) -> None:
    path = tmp_path / "new" / "picture.png"
    fit(Timeline(path=str(path), first_step=3, steps=2), batches)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_fit_that_ends_before_the_first_step_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ended after 3 batches, before first_step=3; nothing was drawn. Set a sm"):
        fit(Timeline(path=str(tmp_path / "picture.png"), first_step=3), 3)
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_that_reports_nothing_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing was told about the time of the steps, so nothing was drawn. Use"):
        fit(Timeline(path=str(tmp_path / "picture.png"), first_step=0), 3, tells=False)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_matplotlib_is_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else found(name))
    job = Job()
    trainer = pl.Trainer(**QUIET, logger=False, callbacks=Timeline(path=str(tmp_path / "picture.png")))
    with pytest.raises(ConfigError, match=r"matplotlib, which is not installed. Install it \(pip install matplotlib\)"):
        trainer.fit(job, DataLoader([torch.ones(2, 1)], batch_size=None))
    assert job.steps == 0


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=0, first_step=20: at least one step, counted from 0, is drawn"):
        Timeline(steps=0)
    with pytest.raises(ConfigError, match="path='timeline' is no picture. End it in .png, .svg, .pdf."):
        Timeline(path="timeline")


YAML = """
trainer:
  accelerator: cpu
  logger: false
  callbacks:
    - class_path: lightning_distrec.Throughput
      init_args: {every_n_steps: 10, window: 20, samples_from: label}
    - class_path: lightning_distrec.Communication
      init_args: {every_n_steps: 10}
    - class_path: lightning_distrec.Timeline
      init_args: {path: pictures/steps.png, first_step: 50, steps: 3}
"""


def test_yaml_reaches_every_argument(tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    (tmp_path / "config.yaml").write_text(YAML)
    cli = LightningCLI(Job, run=False, save_config_callback=None, args=["--config", str(tmp_path / "config.yaml")])
    throughput, communication, timeline = cli.trainer.callbacks[:3]  # type: ignore[attr-defined]
    assert (throughput._log_times._every, throughput._steps.maxlen, throughput._samples_from) == (10, 20, "label")
    assert communication._log_times._every == 10
    assert (timeline._path, timeline._first_step, timeline._steps) == (Path("pictures/steps.png"), 50, 3)
