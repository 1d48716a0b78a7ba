"""The steps of a fit as a callback sees them: when each began and ended, what passed in it, when to log.

A step is one batch, from the end of the batch before it, so that fetching it is inside. Validation is not.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_distrec._compat.lightning import batches_that_stepped
from lightning_distrec.errors import ConfigError
from lightning_distrec.spans import CONCURRENT, Span, subscribe


@dataclass(frozen=True)
class Step:
    """One step on this rank; begin and end are seconds of time.perf_counter."""

    begin: float
    end: float
    seconds: float
    """Its length, without what was paused."""
    spans: list[Span]
    """Those that ended in it, in the order in which they did."""


class StepClock:
    """Cuts the time of a fit into steps; between `start` and `stop` it listens to spans."""

    def __init__(self) -> None:
        self._unlisten: Callable[[], None] | None = None
        self._begin = 0.0
        self._paused_seconds = 0.0
        self._paused_at: float | None = None
        self._spans: list[Span] = []

    def start(self) -> None:
        """Begin to listen, and begin the first step."""
        self.stop()
        self._unlisten = subscribe(self._hear)
        self.begin()

    def begin(self) -> None:
        """Begin a step now; what passed since the last one ended belongs to none."""
        self._begin = time.perf_counter()
        self._paused_seconds, self._paused_at, self._spans = 0.0, None, []

    def pause(self) -> None:
        """Stand still: the time until `resume`, and the spans in it, belong to no step."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused_at is not None:
            self._paused_seconds += time.perf_counter() - self._paused_at
            self._paused_at = None

    def end(self) -> Step:
        """End the step and begin the next."""
        begin, paused, spans = self._begin, self._paused_seconds, self._spans
        self.begin()
        return Step(begin, self._begin, self._begin - begin - paused, spans)

    def stop(self) -> None:
        """Listen no longer; may be called at any time, and more than once."""
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    @property
    def running(self) -> bool:
        """Whether it is between `start` and `stop`."""
        return self._unlisten is not None

    def _hear(self, span: Span) -> None:
        if self._paused_at is None:
            self._spans.append(span)


class Clocked(Callback):
    """A callback whose `clock` stands still in validation and stops with the fit, however that ends."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = StepClock()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.begin()  # what callbacks and loops did between two epochs is part of no step

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.resume()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.clock.stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock.stop()


def pieces(spans: Iterable[Span]) -> list[Span]:
    """Cut spans so that each moment belongs to one of them, to the one that began last; in order of time.

    A wait inside of forward is then no part of forward. Travels are left out: they pass beside all else.
    """
    cut: list[Span] = []
    open_spans: list[Span] = []
    now = 0.0

    def until(moment: float) -> None:
        """Give the time from `now` to the spans that are open, innermost first."""
        nonlocal now
        while open_spans and now < moment:
            span = open_spans[-1]
            end = min(span.end, moment)
            if end > now:
                cut.append(Span(span.name, now, end))
                now = end
            if span.end <= moment:
                open_spans.pop()
        now = moment

    for span in sorted((s for s in spans if s.name not in CONCURRENT), key=lambda s: (s.begin, -s.end)):
        until(span.begin)
        open_spans.append(span)
    until(max((s.end for s in open_spans), default=now))
    return cut


def seconds_by_span(step: Step) -> dict[str, float]:
    """Return name -> seconds of the step that passed in spans of this name and in no later one."""
    seconds: dict[str, float] = {}
    for piece in pieces(step.spans):
        seconds[piece.name] = seconds.get(piece.name, 0.0) + max(piece.end - max(piece.begin, step.begin), 0.0)
    return seconds


class LogTimes:
    """When to tell the loggers: every so many optimizer steps, and as often as Lightning does where that is None."""

    def __init__(self, owner: str, every_n_steps: int | None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(
                f"{owner}: every_n_steps={every_n_steps} must be at least 1; leave it out to log when Lightning does."
            )
        self._every = every_n_steps
        self._last = -1

    def start(self) -> None:
        """Forget an earlier fit."""
        self._last = -1

    def due(self, trainer: Trainer) -> bool:
        """Whether to log at the end of this batch; once for each step where batches are accumulated."""
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]  # set at run time
        step = batches_that_stepped(trainer)
        if not every or step == self._last or (step + 1) % every:
            return False
        self._last = step
        return True


def log(trainer: Trainer, numbers: dict[str, float]) -> None:
    """Give `numbers` to every logger of the trainer, at the step at which Lightning logs this batch."""
    step = batches_that_stepped(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)
