"""How far a number can go: by doubling and halving, with an end to the tries and to the time that they take."""

import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_TRIES = 60
FINE = 100
"""The largest number is found to within a hundredth of it."""

WhyNot = Callable[[int], str]
"""Number -> why it cannot be; "" where it can."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What was found between numbers that can be and numbers that cannot."""

    found: int | None
    """The last number that can be; None: none was found."""
    beyond: int | None
    """The next one that was seen not to be possible; None: none was seen."""
    why: str = ""
    """Why not."""
    tries: int = 0
    stopped: str = ""
    """Why the search ended early; "" where it did not."""


class _TimeIsUp(Exception):
    """The next try would take too long."""


class EdgeSearch:
    """One search. Numbers that are known beforehand cost no try."""

    def __init__(self, why_not: WhyNot, known: dict[int, str], most_seconds: float, seconds_of_try: float) -> None:
        """known: number -> as `why_not` would say. seconds_of_try: how long the first one is taken to last."""
        self._why_not = why_not
        self._known = dict(known)
        self._most_seconds = most_seconds
        self._longest = seconds_of_try
        self._began = time.perf_counter()
        self._tries = 0

    def largest(self, start: int, most: int) -> Edge:
        """Return how far up numbers from 1 to `most` can go; `start` is where to look first."""
        found = beyond = None
        stopped = ""
        try:
            number = start
            if self._can(number):
                found = number
                while beyond is None and found < most:
                    number = min(most, 1 << found.bit_length())
                    found, beyond = (number, None) if self._can(number) else (found, number)
            else:
                beyond = number
                while found is None and beyond > 1:
                    number = 1 << (beyond - 1).bit_length() - 1
                    found, beyond = (number, beyond) if self._can(number) else (None, number)
            while found is not None and beyond is not None and beyond - found > max(1, found // FINE):
                number = (found + beyond) // 2
                found, beyond = (number, beyond) if self._can(number) else (found, number)
        except _TimeIsUp as up:
            stopped = str(up)
        return self._edge(found, beyond, stopped)

    def smallest(self, least: int, most: int) -> Edge:
        """Return how far down numbers from `most` to `least` can go. Doubling goes up from `least`, to spare tries."""
        found = min((n for n, why in self._known.items() if not why), default=None)
        beyond = max((n for n, why in self._known.items() if why and (found is None or n < found)), default=None)
        floor = max(least - 1, beyond or 0)
        stopped = ""
        try:
            number = floor + 1
            while number <= most and (found is None or number < found):
                if self._can(number):
                    found = number
                else:
                    floor = beyond = number
                    following = 1 << number.bit_length()
                    number = min(following, most) if number < most else following
            while found is not None and found - floor > 1:
                number = (found + floor) // 2
                if self._can(number):
                    found = number
                else:
                    floor = beyond = number
        except _TimeIsUp as up:
            stopped = str(up)
        return self._edge(found, beyond, stopped)

    def _edge(self, found: int | None, beyond: int | None, stopped: str) -> Edge:
        why = "" if beyond is None else self._known[beyond]
        return Edge(found=found, beyond=beyond, why=why, tries=self._tries, stopped=stopped)

    def _can(self, number: int) -> bool:
        if number not in self._known:
            spent = time.perf_counter() - self._began
            if spent + self._longest > self._most_seconds:
                raise _TimeIsUp(f"the next plan would have taken it beyond {self._most_seconds:g} s")
            if self._tries >= MOST_TRIES:
                raise _TimeIsUp(f"{MOST_TRIES} plans were tried")
            begun = time.perf_counter()
            self._known[number] = self._why_not(number)
            self._tries += 1
            self._longest = max(self._longest, time.perf_counter() - begun)
        return not self._known[number]
