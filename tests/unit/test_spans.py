"""Spans are emitted to those who listen, and exclusive so that every moment of a step belongs to
one of them."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from lightning_distrec import spans
from lightning_distrec.observe import steps
from lightning_distrec.observe.steps import Step, StepClock, exclusive_spans
from lightning_distrec.spans import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    WAIT_OUTPUT_DIST,
    Span,
    emit,
    span,
    subscribe,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still but where the test sets `seconds`."""
    clock = SimpleNamespace(seconds=100.0)
    time = SimpleNamespace(perf_counter=lambda: clock.seconds, process_time=lambda: clock.seconds)
    monkeypatch.setattr(spans, "time", time)
    monkeypatch.setattr(steps, "time", time)
    return clock


@pytest.fixture
def heard() -> Iterator[list[Span]]:
    """What a listener hears during the test."""
    heard: list[Span] = []
    stop = subscribe(heard.append)
    yield heard
    stop()


def test_nothing_is_reported_after_stop_nor_of_spans_that_began_without_a_listener() -> None:
    heard: list[Span] = []
    outer = span(FORWARD)
    assert outer is span(BACKWARD), "a span that nobody sees is no range"
    outer.__enter__()
    stop = subscribe(heard.append)
    outer.__exit__(None, None, None)
    stop()
    stop()
    with span(FORWARD):
        pass
    assert heard == []


@pytest.mark.parametrize("has_subscriber", [True, False])
def test_a_profiler_shows_spans_as_ranges(has_subscriber: bool) -> None:
    unsubscribe = subscribe(lambda _: None) if has_subscriber else lambda: None
    with span(BACKWARD):
        pass
    with torch.profiler.profile() as profile, span(FORWARD), span(WAIT_OUTPUT_DIST):
        pass
    unsubscribe()
    assert [event.name for event in profile.events()] == [FORWARD, WAIT_OUTPUT_DIST]


def _owner(emitted: list[Span], moment: float) -> str | None:
    """Return, by trying them all, the name of the span that began last of those that hold
    `moment`."""
    holding = [s for s in emitted if s.begin < moment < s.end]
    return max(holding, key=lambda s: s.begin).name if holding else None


@pytest.mark.parametrize("seed", range(3))
def test_every_moment_belongs_to_the_span_that_began_last(seed: int) -> None:
    draw = random.Random(seed)
    names = [FORWARD, BACKWARD, OPTIMIZER, WAIT_OUTPUT_DIST]
    begins = draw.sample(range(100), 12)
    emitted = [
        Span(draw.choice(names), float(begin), float(begin + draw.randint(1, 40)))
        for begin in begins
    ]
    exclusive = exclusive_spans(emitted)
    for moment in (0.5 + i for i in range(150)):
        owners = [piece.name for piece in exclusive if piece.begin < moment < piece.end]
        assert owners == [name for name in [_owner(emitted, moment)] if name is not None]


def test_a_step_reaches_from_the_end_of_the_one_before_and_leaves_pauses_out(
    clock: SimpleNamespace,
) -> None:
    steps_of = StepClock()
    steps_of.start()
    clock.seconds = 101.0
    emit(FORWARD, 100.5, 101.0)
    first = steps_of.end()
    clock.seconds = 102.0
    steps_of.pause()
    emit(BACKWARD, 101.0, 102.0)
    clock.seconds = 110.0
    steps_of.resume()
    clock.seconds = 110.5
    second = steps_of.end()
    steps_of.stop()
    emit(FORWARD, 110.0, 110.5)
    clock.seconds = 120.0
    steps_of.begin()
    clock.seconds = 121.0
    assert first == Step(100.0, 101.0, 1.0, [Span(FORWARD, 100.5, 101.0)], 1.0)
    assert second == Step(101.0, 110.5, 1.5, [], 1.5)
    assert steps_of.end() == Step(120.0, 121.0, 1.0, [], 1.0)
