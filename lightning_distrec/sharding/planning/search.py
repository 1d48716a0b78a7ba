"""Search for the placement whose slowest rank has least to do: proposals by prices, then moves of single tables.

A table's choices differ in time and memory. For given prices of memory, and a limit on one shard's time, the best
choice of each table is known at once; placing the chosen shards, largest first, on the ranks with least to do gives a
placement. The best of those are then improved, see moves.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.moves import Effort, polish, thrown_about
from lightning_distrec.sharding.planning.partial_plan import MemoryBudget, PartialPlan
from lightning_distrec.sharding.planning.sharding_options import EstimatedOption
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES

PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
"""What all memory of a kind costs, in units of all time that the tables need."""
MAX_COMBINATIONS = 300
"""So many of all tables' choices are looked at one by one, in place of prices."""
NUM_PRICES = 6
"""Prices that are tried from the first on at which tables find room."""
NUM_STARTS = 4
"""Placements that are improved."""
NUM_LIMITS = 10
"""Limits on one shard's time that are tried at each price."""


GOOD_ENOUGH = 1 + 1e-6
"""Times the lower bound, at which nothing more is tried."""


class Totals:
    """Sums over the shards of every choice, as arrays of (tables, most choices of one)."""

    def __init__(self, choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget) -> None:
        shape = (len(choices), max(len(of_table) for of_table in choices))
        self.time, self.longest = np.full(shape, np.inf), np.full(shape, np.inf)
        self.device, self.host = np.zeros(shape), np.zeros(shape)
        cuts = sorted({choice.cut for of_table in choices for choice in of_table})
        self.with_cut = {cut: np.zeros(shape, dtype=bool) for cut in cuts}
        """Cut -> (tables, most choices of one): the choices that have it."""
        for t, of_table in enumerate(choices):
            for c, choice in enumerate(of_table):
                self.time[t, c] = choice.milliseconds.sum()
                self.longest[t, c] = choice.milliseconds.max()
                self.device[t, c] = choice.device_bytes.sum()
                self.host[t, c] = choice.host_bytes.sum()
                self.with_cut[choice.cut][t, c] = True
        self.least = float(self.time.min(axis=1).sum())
        """Milliseconds of all tables on all ranks together, at the least."""
        self.lower_bound = max(self.least / room.num_ranks, float(self.longest.min(axis=1).max()))
        """No placement has a shorter critical path than this."""

    def best_choices(self, prices: tuple[float, float], limit: float, cut: str, room: MemoryBudget) -> NDArray[np.intp]:
        """Return each table's best choice at these prices of memory (device, host), none of its shards over `limit`.

        A table that has no such choice gets the one whose longest shard is shortest. cut: what all tables are cut that
        can be; "" for any.
        """
        cost = self.time / (self.least or 1.0)
        for price, used, there in zip(
            prices, (self.device, self.host), (room.device_bytes, room.host_bytes), strict=True
        ):
            cost = cost + price * used / max(1.0, float(there.sum()))
        cost = np.where(self.longest <= limit, cost, 1e12 + self.longest)
        if cut:
            cost = np.where(self.with_cut[cut], cost, 1e24 + cost)
        best: NDArray[np.intp] = np.where(np.isfinite(self.time), cost, np.inf).argmin(axis=1)
        return best


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    placement: PartialPlan
    lower_bound: float
    """Milliseconds that the critical path of no placement is below."""


def search(
    choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget, seed: int = 0, start: PartialPlan | None = None
) -> Found | None:
    """Return the best placement found; None where none was found. Equal input gives equal placements.

    choices: of each table, those that fit on empty ranks. start: a placement to improve, in place of proposals.
    """
    totals = Totals(choices, room)
    starts = _proposals(choices, totals, room) if start is None else [start]
    return Found(improve(starts, totals, seed), totals.lower_bound) if starts else None


def improve(starts: Sequence[PartialPlan], totals: Totals, seed: int = 0) -> PartialPlan:
    """Return the best that comes of moving single tables, from each start, and of throwing some about at random."""
    num_tables, num_ranks = len(starts[0].choices), starts[0].room.num_ranks
    effort = Effort(max(8000, min(60_000, 12_000_000 // (num_tables + 8 * num_ranks))))
    patience = fruitless = min(400, (4 if _few(starts[0].choices) else 60) * num_tables)
    polished = [polish(start.copy(), effort, level) for start in starts for level in (False, True)]
    best = min(polished, key=lambda placement: placement.critical_path)
    draw = np.random.default_rng(seed)
    goal = totals.lower_bound * GOOD_ENOUGH
    while effort.left > 0 and fruitless > 0 and best.critical_path > goal:
        fruitless -= 1
        tried = thrown_about(best, draw, effort)
        if tried is None:
            effort.spend()
            continue
        tried = polish(tried, effort, level=fruitless % 2 == 0)
        if tried.critical_path < best.critical_path * (1 - 1e-9):
            best, fruitless = tried, patience
    return best


def _few(choices: Sequence[Sequence[EstimatedOption]]) -> bool:
    """Return whether all combinations of choices can be looked at."""
    return prod(len(of_table) for of_table in choices) <= MAX_COMBINATIONS


def _proposals(choices: Sequence[Sequence[EstimatedOption]], totals: Totals, room: MemoryBudget) -> list[PartialPlan]:
    """Return some placements, the best first: those of the lowest prices at which there is room, and of higher ones.

    Or of all combinations, where they are few.
    """
    found: list[PartialPlan] = []
    if _few(choices):
        for picks in product(*(range(len(of_table)) for of_table in choices)):
            found += pack(choices, np.asarray(picks), room)
        return sorted(found, key=lambda placement: placement.critical_path)[:NUM_STARTS]
    seen: set[bytes] = set()
    more = NUM_PRICES
    for prices in _all_prices(room):
        for limit, cut in _restrictions(totals):
            picked = totals.best_choices(prices, limit, cut, room)
            if picked.tobytes() not in seen:
                seen.add(picked.tobytes())
                found += pack(choices, picked, room)
        more -= bool(found)
        if more == 0:
            break
    return sorted(found, key=lambda placement: placement.critical_path)[:NUM_STARTS]


def _all_prices(room: MemoryBudget) -> Iterator[tuple[float, float]]:
    """Yield prices of the device's and the host's memory, low ones first."""
    host_prices = PRICES if room.host_bytes.any() else (0.0,)
    pairs = [(device, host) for device in PRICES for host in host_prices]
    yield from sorted(pairs, key=lambda pair: (max(pair), sum(pair)))


def _restrictions(totals: Totals) -> Iterator[tuple[float, str]]:
    """Yield limits on a shard's time, from none to the lower bound of a critical path; and each cut, for all tables."""
    longest = totals.longest[np.isfinite(totals.longest)]
    lowest = max(totals.lower_bound, 1e-9)
    limits = np.geomspace(max(float(longest.max()), lowest), lowest, NUM_LIMITS) * (1 + 1e-9)
    yield from ((float(limit), "") for limit in limits)
    yield from ((float(limits[0]), cut) for cut in totals.with_cut)


def pack(
    choices: Sequence[Sequence[EstimatedOption]], picked: NDArray[np.intp], room: MemoryBudget
) -> list[PartialPlan]:
    """Return placements of the picked choices, largest first, by time and by memory: those that find room."""
    found: list[PartialPlan] = []
    for by_memory in (False, True):
        placement = PartialPlan(choices, room)
        for table in _order(choices, picked, by_memory):
            choice = choices[table][picked[table]]
            ranks = placement.find_ranks(choice, by_memory)
            if ranks is None:
                break
            placement.put(table, int(picked[table]), ranks)
        else:
            found.append(placement)
    return found


def _order(choices: Sequence[Sequence[EstimatedOption]], picked: NDArray[np.intp], by_memory: bool) -> list[int]:
    """Return tables in the order in which they are placed: those on all ranks, then those with most for one rank."""

    def size(table: int) -> tuple[bool, float]:
        choice = choices[table][picked[table]]
        largest = choice.device_bytes + choice.host_bytes if by_memory else choice.milliseconds
        return choice.cut in EVERY_RANK_TYPES, float(largest.max())

    return sorted(range(len(choices)), key=size, reverse=True)
