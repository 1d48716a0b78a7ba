"""Where the time of a step goes: spans of time, told where they pass, heard by callbacks.

Without a listener a span costs less than a microsecond.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FETCH = "wait for data"
"""The dataloader is asked for a batch."""
WAIT_IDS = "wait for ids"
"""A lookup needs ids that have not arrived yet."""
WAIT_ROWS = "wait for rows"
"""User code touches looked up rows that have not arrived yet."""
WAIT_RANKS = "wait for ranks"
"""The ranks' message about the step has not arrived yet."""
SEND_IDS = "send ids"
"""The exchange of a batch's ids is prepared and started."""
IDS_TRAVEL = "ids travel"
"""From the start of a batch's exchange of ids to the lookup that takes them."""
ROWS_TRAVEL = "rows travel"
"""From the start of an exchange of rows to the first touch of them."""
FORWARD = "forward"
"""The user's step, on the way to its loss; waits are inside of it."""
BACKWARD = "backward"
OPTIMIZER = "optimizer"
"""The optimizers' own steps."""
TRAVELS = (IDS_TRAVEL, ROWS_TRAVEL)
"""These pass beside what the rank does; all others are what it does or waits for."""


@dataclass(frozen=True)
class Span:
    """One stretch of time on this rank; seconds of time.perf_counter."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


Listener = Callable[[Span], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Tell `listener` of every span that ends from now on; returns what stops it."""
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop


def tell(name: str, begin: float, end: float) -> None:
    """Tell the listeners of a span that has passed."""
    for listener in list(_listeners):
        listener(Span(name, begin, end))


class span:  # noqa: N801 - used as `with span(FORWARD):`
    """The time inside of the context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = 0.0

    def __enter__(self) -> None:
        self.begin = time.perf_counter() if _listeners else 0.0

    def __exit__(self, *_: Any) -> None:
        if self.begin and _listeners:
            tell(self.name, self.begin, time.perf_counter())
