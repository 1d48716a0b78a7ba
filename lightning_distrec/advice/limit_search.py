"""Finds the largest or smallest possible number by doubling and halving, within a limit of tries and of time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_TRIES = 60
FINENESS = 100
"""The largest number is found to within this fraction of it."""

WhyNot = Callable[[int], str]
"""Number -> why it is not possible; "" where it is."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The edge between possible and impossible numbers."""

    found: int | None
    """The last possible number; None if none was found."""
    beyond: int | None
    """The next number that was found impossible; None if none was."""
    why: str = ""
    """Why that is impossible."""
    tries: int = 0
    stopped: str = ""
    """Why the search ended early; "" if it did not."""


class _TimeIsUp(Exception):
    """The next try would take too long."""


class EdgeSearch:
    """One search. Numbers that are known beforehand are not tried."""

    def __init__(self, why_not: WhyNot, known: dict[int, str], max_seconds: float, seconds_of_try: float) -> None:
        """known: number -> the result of `why_not`. seconds_of_try: estimated time of the first try."""
        self._why_not = why_not
        self._known = dict(known)
        self._max_seconds = max_seconds
        self._longest = seconds_of_try
        self._began = time.perf_counter()
        self._tries = 0

    def largest(self, start: int, upper: int) -> Edge:
        """Return the largest possible number from 1 to `upper`; `start` is tried first."""
        found = beyond = None
        stopped = ""
        try:
            number = start
            if self._can(number):
                found = number
                while beyond is None and found < upper:
                    number = min(upper, 1 << found.bit_length())
                    found, beyond = (number, None) if self._can(number) else (found, number)
            else:
                beyond = number
                while found is None and beyond > 1:
                    number = 1 << (beyond - 1).bit_length() - 1
                    found, beyond = (number, beyond) if self._can(number) else (None, number)
            while found is not None and beyond is not None and beyond - found > max(1, found // FINENESS):
                number = (found + beyond) // 2
                found, beyond = (number, beyond) if self._can(number) else (found, number)
        except _TimeIsUp as up:
            stopped = str(up)
        return self._edge(found, beyond, stopped)

    def smallest(self, lower: int, upper: int) -> Edge:
        """Return the smallest possible number from `lower` to `upper`, by doubling from `lower` to save tries."""
        found = min((n for n, why in self._known.items() if not why), default=None)
        beyond = max((n for n, why in self._known.items() if why and (found is None or n < found)), default=None)
        floor = max(lower - 1, beyond or 0)
        stopped = ""
        try:
            number = floor + 1
            while number <= upper and (found is None or number < found):
                if self._can(number):
                    found = number
                else:
                    floor = beyond = number
                    following = 1 << number.bit_length()
                    number = min(following, upper) if number < upper else following
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
            if spent + self._longest > self._max_seconds:
                raise _TimeIsUp(f"the next plan would have exceeded {self._max_seconds:g} s")
            if self._tries >= MAX_TRIES:
                raise _TimeIsUp(f"{MAX_TRIES} plans were tried")
            begun = time.perf_counter()
            self._known[number] = self._why_not(number)
            self._tries += 1
            self._longest = max(self._longest, time.perf_counter() - begun)
        return not self._known[number]
