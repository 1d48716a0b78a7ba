"""Measures the steps of a fit for callbacks: begin, end and spans of each, and when to log.

A step is one batch. It begins at the end of the previous batch, so that it includes fetching;
validation is excluded.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_distrec._compat.lightning import batches_that_stepped
from lightning_distrec.spans import Span, subscribe


@dataclass(frozen=True)
class Step:
    """One step on this rank; begin and end are seconds of time.perf_counter."""

    begin: float
    end: float
    seconds: float
    """Its duration without pauses."""
    spans: list[Span]
    """The spans that ended in it, in the order of their ends."""
    cpu_seconds: float = 0.0
    """CPU time of all threads of this process, without pauses."""


class StepClock:
    """Divides the time of a fit into steps; between `start` and `stop` it collects spans."""

    def __init__(self) -> None:
        self._unsubscribe: Callable[[], None] | None = None
        self._paused_at: float | None = None
        self._begin = self._paused_seconds = self._cpu_begin = self._cpu_paused = 0.0
        self._spans: list[Span] = []

    def start(self) -> None:
        """Begin to collect spans, and begin the first step."""
        self.stop()
        self._unsubscribe = subscribe(self._add)
        self.begin()

    def begin(self) -> None:
        """Begin a step now; the time since the end of the last one belongs to no step."""
        # process_time counts CPU time of all threads: also those of autograd, gloo and data loading
        # in this process.
        self._begin = time.perf_counter()
        self._cpu_begin = time.process_time()
        self._paused_seconds = 0.0
        self._paused_at = None
        self._spans = []

    def pause(self) -> None:
        """Stop the clock: the time until `resume`, and the spans in it, belong to no step."""
        self._paused_at = time.perf_counter()
        self._cpu_paused = time.process_time()

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._paused_at is not None:
            self._paused_seconds += time.perf_counter() - self._paused_at
            # A step's CPU time is one difference of two readings, so its begin moves on by what the
            # pause took.
            self._cpu_begin += time.process_time() - self._cpu_paused
            self._paused_at = None

    def end(self) -> Step:
        """End the step and begin the next."""
        # One reading of the clock ends a step and begins the next, so that no time is lost between
        # them.
        begin = self._begin
        paused = self._paused_seconds
        spans = self._spans
        cpu = self._cpu_begin
        self.begin()
        return Step(begin, self._begin, self._begin - begin - paused, spans, self._cpu_begin - cpu)

    def stop(self) -> None:
        """Stop collecting spans; on_exception, teardown and a new fit may all come here."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    @property
    def running(self) -> bool:
        """Return whether the clock is between `start` and `stop`."""
        return self._unsubscribe is not None

    def _add(self, span: Span) -> None:
        if self._paused_at is None:
            self._spans.append(span)


class Stoppable(Callback):
    """A callback that stops when training ends or fails."""

    def stop(self) -> None:
        """Undo what was begun; called at any time, and more than once."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stop()


class Clocked(Stoppable):
    """A callback with a `clock` that pauses during validation and stops when training ends or
    fails."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = StepClock()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.begin()  # the time between two epochs is part of no step

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # It runs between two batches of training, within what the clock takes for a step.
        self.clock.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.resume()

    @override
    def stop(self) -> None:
        self.clock.stop()


def exclusive_spans(spans: Iterable[Span]) -> list[Span]:
    """Split spans so that each moment belongs to one of them, the one that began last; in order of
    time.

    A wait inside of forward is then not part of forward.
    """
    exclusive: list[Span] = []
    open_spans: list[Span] = []
    position = 0.0

    def until(moment: float) -> None:
        # The time from `position` on belongs to the innermost of the open spans.
        nonlocal position
        while open_spans and position < moment:
            span = open_spans[-1]
            end = min(span.end, moment)
            if end > position:
                exclusive.append(Span(span.name, position, end))
                position = end
            if span.end <= moment:
                open_spans.pop()
        position = moment

    # Spans arrive by their ends. Of two that begin together the longer one contains the other, so
    # it opens first.
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        until(span.begin)
        open_spans.append(span)
    until(max((s.end for s in open_spans), default=position))
    return exclusive


def seconds_by_span(step: Step) -> dict[str, float]:
    """Return name -> seconds of the step in spans of this name, without the spans nested in
    them."""
    seconds: dict[str, float] = {}
    for span in exclusive_spans(step.spans):
        # A span counts in the step in which it ends, with its time in that step alone.
        seconds[span.name] = seconds.get(span.name, 0.0) + max(
            span.end - max(span.begin, step.begin), 0.0
        )
    return seconds


class LogTimes:
    """Decides when to log: every `Trainer(log_every_n_steps)` optimizer steps, as Lightning
    does."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Reset for a new fit."""
        self._last = -1

    def due(self, trainer: Trainer) -> bool:
        """Return whether to log at the end of this batch; once per step when gradients accumulate
        over batches."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set at run time
        step = batches_that_stepped(trainer)
        # Lightning raises the number after the batch that steps: batches of one accumulation have
        # the same number.
        if not every or step == self._last or (step + 1) % every:
            return False
        self._last = step
        return True


def log(trainer: Trainer, numbers: dict[str, float]) -> None:
    """Log `numbers` with every logger of the trainer, at the step at which Lightning logs this
    batch."""
    step = batches_that_stepped(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)


def end_progress_bar(trainer: Trainer, module: LightningModule) -> None:
    """End the bar, which would be drawn again below a table that is printed while it is active."""
    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_callback.teardown(trainer, module, "fit")


def all_gather(local: Tensor) -> list[Tensor]:
    """Collective. Return the tensors of all ranks, which have one shape."""
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return gathered
