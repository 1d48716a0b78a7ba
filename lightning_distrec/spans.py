"""Spans: where the time of a step goes. The code that spends the time emits them; callbacks subscribe to them.

Without a subscriber a span costs a fifth of a microsecond.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

WAIT_DATA = "wait for data"
"""The dataloader is asked for a batch."""
WAIT_INPUT_DIST = "wait for input dist"
"""A lookup waits for ids from other ranks."""
WAIT_OUTPUT_DIST = "wait for output dist"
"""User code accesses a lazy output, and its rows have not arrived yet."""
WAIT_CONTROL_MESSAGE = "wait for control message"
"""The fetcher waits for the control messages of the other ranks."""
START_INPUT_DIST = "start input dist"
"""The exchange of a batch's ids is prepared and started."""
INPUT_DIST = "input dist"
"""From the start of a batch's exchange of ids to the lookup that takes them."""
OUTPUT_DIST = "output dist"
"""From the start of an exchange of rows to the first access to them."""
FORWARD = "forward"
"""The user's step, up to its loss; waits are inside of it."""
BACKWARD = "backward"
OPTIMIZER = "optimizer"
"""The optimizers' own steps."""
STAGE_FORWARD, STAGE_BACKWARD, STAGE_LOSS = "stage forward", "stage backward", "stage loss"
"""A stage computes a micro-batch, or the loss; the names are followed by the stage's number and the micro-batch's."""
CONCURRENT = (INPUT_DIST, OUTPUT_DIST)
"""These run while the rank does something else; the other spans are what the rank does or waits for."""


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
    """Call `subscriber` with every span that ends from now on; returns a function that unsubscribes it."""
    _subscribers.append(subscriber)

    def unsubscribe() -> None:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)

    return unsubscribe


def emit(name: str, begin: float, end: float) -> None:
    """Pass a span that has ended to all subscribers."""
    for subscriber in list(_subscribers):
        subscriber(Span(name, begin, end))


def span(name: str) -> AbstractContextManager[None]:
    """Return a context that emits the time spent inside of it as a span; one that does nothing without a subscriber."""
    return _Timed(name) if _subscribers else _NOT_TIMED


_NOT_TIMED = nullcontext()


class _Timed:
    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        emit(self._name, self._begin, time.perf_counter())
