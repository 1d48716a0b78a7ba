"""The trace of a few steps holds the spans that were emitted: nested, on the right track, as long as they were."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import Timeline, spans
from lightning_distrec.callbacks.steps import Step
from lightning_distrec.callbacks.trace import COMPUTE, trace_events
from lightning_distrec.errors import ConfigError
from lightning_distrec.spans import BACKWARD, FORWARD, INPUT_DIST, OUTPUT_DIST, WAIT_OUTPUT_DIST, Span, span, subscribe
from tests.support.traces import check_tracks, spans_in, steps_in
from tests.unit.test_throughput import QUIET

STEPS = [Step(10.0, 10.010, 0.010, []), Step(10.010, 10.030, 0.020, [])]
SPANS = [
    Span(WAIT_OUTPUT_DIST, 10.002, 10.003),
    Span(FORWARD, 10.0, 10.005),
    Span(INPUT_DIST, 9.0, 10.011),
    Span(INPUT_DIST, 10.004, 10.020),
    Span(OUTPUT_DIST, 10.012, 10.016),
    Span(OUTPUT_DIST, 10.014, 10.018),
    Span(BACKWARD, 10.015, 10.030),
    Span("a new name", 10.011, 10.016),
]


def _tracks(events: list[dict[str, Any]]) -> dict[int, tuple[str, list[str]]]:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {
        tid: (name, [e["name"] for e in events if e["ph"] == "X" and e["tid"] == tid]) for tid, name in names.items()
    }


def test_each_span_is_an_event_of_its_rank_with_its_begin_and_duration() -> None:
    events = trace_events(3, STEPS, 20, SPANS, 9.5)
    assert {event["pid"] for event in events} == {3}
    assert next(e["args"] for e in events if e["name"] == "process_name") == {"name": "rank 3"}
    found = {(e["name"], round(e["ts"] + 9.5e6, 3), round(e["dur"], 3)) for e in events if e["ph"] == "X"}
    expected = {(s.name, round(1e6 * s.begin, 3), round(1e6 * s.seconds, 3)) for s in SPANS}
    assert found == expected | {("step 20", 10.0e6, 10_000), ("step 21", 10.010e6, 20_000)}


def test_spans_that_overlap_without_nesting_are_on_different_tracks() -> None:
    events = trace_events(0, STEPS, 20, SPANS, 9.5)
    check_tracks(events)
    assert _tracks(events) == {
        0: ("steps", ["step 20", "step 21"]),
        1: (COMPUTE, [FORWARD, WAIT_OUTPUT_DIST, "a new name"]),
        2: (COMPUTE, [BACKWARD]),  # begins before the new name ends, and ends after it
        3: (INPUT_DIST, [INPUT_DIST]),
        4: (INPUT_DIST, [INPUT_DIST]),
        5: (OUTPUT_DIST, [OUTPUT_DIST]),
        6: (OUTPUT_DIST, [OUTPUT_DIST]),
    }


class Job(pl.LightningModule):
    """Emits its forward, with a wait inside of it."""

    def __init__(self, emits: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.emits = emits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.emits:
            return self.layer(batch).sum()
        with span(FORWARD), span(WAIT_OUTPUT_DIST):
            return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(callback: Timeline, batches: int, emits: bool = True) -> list[Span]:
    """Fit, and return all spans that were emitted."""
    emitted: list[Span] = []
    unsubscribe = subscribe(emitted.append)
    loader = DataLoader([torch.ones(2, 1) for _ in range(batches)], batch_size=None)
    pl.Trainer(**QUIET, logger=False, callbacks=callback).fit(Job(emits), loader)
    unsubscribe()
    assert spans._subscribers == []
    return emitted


@pytest.mark.parametrize(("batches", "numbers"), [(10, [3, 4]), (4, [3])])
def test_the_trace_holds_the_emitted_spans_of_its_steps(tmp_path: Path, batches: int, numbers: list[int]) -> None:
    path = tmp_path / "new" / "trace.json"
    emitted = fit(Timeline(path=str(path), first_step=3, steps=2), batches)
    events = json.loads(path.read_text())["traceEvents"]
    check_tracks(events)
    assert steps_in(events) == {0: [f"step {number}" for number in numbers]}
    assert spans_in(events) == {
        0: [(s.name, pytest.approx(1e6 * s.seconds)) for s in emitted[6 : 6 + 2 * len(numbers)]]
    }


def test_a_fit_that_ends_before_the_first_step_warns(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="ended after 3 batches, before first_step=3, so no trace was written. Set a sm"
    ):
        fit(Timeline(path=str(tmp_path / "trace.json"), first_step=3), 3)
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_without_spans_gets_its_steps_and_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.warns(UserWarning, match="the strategy emits no spans, so the trace contains steps only. Use one of"):
        fit(Timeline(path=str(path), first_step=0), 3, emits=False)
    events = json.loads(path.read_text())["traceEvents"]
    assert (steps_in(events), spans_in(events)) == ({0: ["step 0", "step 1", "step 2"]}, {})


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=0, first_step=20: steps must be at least 1, first_step at least 0"):
        Timeline(steps=0)
    with pytest.raises(ConfigError, match="path='timeline.png' must end in .json"):
        Timeline(path="timeline.png")


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
      init_args: {path: traces/steps.json, first_step: 50, steps: 3}
"""


def test_yaml_reaches_every_argument(tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    (tmp_path / "config.yaml").write_text(YAML)
    cli = LightningCLI(Job, run=False, save_config_callback=None, args=["--config", str(tmp_path / "config.yaml")])
    throughput, communication, timeline = cli.trainer.callbacks[:3]  # type: ignore[attr-defined]
    assert (throughput._log_times._every, throughput._steps.maxlen, throughput._samples_from) == (10, 20, "label")
    assert communication._log_times._every == 10
    assert (timeline._path, timeline._first_step, timeline._steps) == (Path("traces/steps.json"), 50, 3)
