"""Spans: where the time of a step goes. Callbacks subscribe to them, and torch's profiler shows
them as ranges.

Without either a span costs a fifth of a microsecond.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function

from lightning_distrec._compat.torch import profiler_runs

# The dataloader is asked for a batch.
WAIT_DATA = "wait for data"
# A lookup waits for ids from other ranks; user code accesses a lazy output whose rows have not
# arrived yet; the fetcher waits for the control messages of the other ranks.
WAIT_INPUT_DIST = "wait for input dist"
WAIT_OUTPUT_DIST = "wait for output dist"
WAIT_CONTROL_MESSAGE = "wait for control message"
# The exchange of a batch's ids is prepared and started.
START_INPUT_DIST = "start input dist"
# The user's step up to its loss, with waits inside of it; backward; the optimizers' own steps.
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
# A stage computes a micro-batch, or the loss; the names are followed by the stage's number and the
# micro-batch's.
STAGE_FORWARD = "stage forward"
STAGE_BACKWARD = "stage backward"
STAGE_LOSS = "stage loss"


@dataclass(frozen=True)
class Span:
    """A named interval on this rank; begin and end are seconds of time.perf_counter."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Return its duration."""
        return self.end - self.begin


Subscriber = Callable[[Span], None]
_subscribers: list[Subscriber] = []


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber` with every span that ends from now on; returns a function that unsubscribes
    it."""
    _subscribers.append(subscriber)

    def unsubscribe() -> None:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)

    return unsubscribe


def emit(name: str, begin: float, end: float) -> None:
    """Pass a span that has ended to all subscribers."""
    for subscriber in list(_subscribers):
        subscriber(Span(name, begin, end))


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context whose time is a span: emitted if there are subscribers, a range if a
    profiler runs."""
    # record_function calls C++ before it looks for a profiler, which costs more than all else here.
    profiled = record_function(name) if profiler_runs() else _NOTHING
    return _Timed(name, profiled) if _subscribers else profiled


_NOTHING = nullcontext()


class _Timed:
    def __init__(self, name: str, profiled: AbstractContextManager[Any]) -> None:
        self._name = name
        self._profiled = profiled
        self._begin = 0.0

    def __enter__(self) -> None:
        self._profiled.__enter__()
        self._begin = time.perf_counter()

    def __exit__(self, *exception: Any) -> None:
        emit(self._name, self._begin, time.perf_counter())
        self._profiled.__exit__(*exception)
