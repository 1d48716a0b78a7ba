"""Search for the placement whose slowest rank has least to do: proposals by prices, then moves of single tables.

A table's choices differ in time and memory. For given prices of memory, and a limit on one shard's time, the best
choice of each table is known at once; placing the chosen shards, largest first, on the ranks with least to do gives a
placement. The best of those is then improved: tables of the slowest rank move, change their choice, or change places
with tables of other ranks; and at last some tables are thrown about at random, to leave where no single move helps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.choices import EVERY_RANK, Choice
from lightning_distrec.sharding.placement import Placement, Ranks, Room

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
STEEPNESS = 16
"""Power in which ranks' times are added up, to see progress while several ranks are equally slow."""


GOOD_ENOUGH = 1 + 1e-6
"""Times the lower bound, at which nothing more is tried."""


Rating = tuple[float, float]
"""A critical path in milliseconds, and how steep the ranks' times are."""


@dataclass
class Effort:
    """How many moves may still be looked at: counted, not timed, so that equal input gets equal plans."""

    left: int

    def spend(self) -> bool:
        """Count one move; returns whether it may be looked at."""
        self.left -= 1
        return self.left >= 0


class Totals:
    """Sums over the shards of every choice, as arrays of (tables, most choices of one)."""

    def __init__(self, choices: Sequence[Sequence[Choice]], room: Room) -> None:
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

    def best_choices(self, prices: tuple[float, float], limit: float, cut: str, room: Room) -> NDArray[np.intp]:
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

    placement: Placement
    lower_bound: float
    """Milliseconds that the critical path of no placement is below."""


def search(
    choices: Sequence[Sequence[Choice]], room: Room, seed: int = 0, start: Placement | None = None
) -> Found | None:
    """Return the best placement found; None where none was found. Equal input gives equal placements.

    choices: of each table, those that fit on empty ranks. start: a placement to improve, in place of proposals.
    """
    totals = Totals(choices, room)
    starts = _proposals(choices, totals, room) if start is None else [start]
    return Found(improve(starts, totals, seed), totals.lower_bound) if starts else None


def improve(starts: Sequence[Placement], totals: Totals, seed: int = 0) -> Placement:
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
        tried = _thrown_about(best, draw, effort)
        if tried is None:
            effort.spend()
            continue
        tried = polish(tried, effort, level=fruitless % 2 == 0)
        if tried.critical_path < best.critical_path * (1 - 1e-9):
            best, fruitless = tried, patience
    return best


def _few(choices: Sequence[Sequence[Choice]]) -> bool:
    """Return whether all combinations of choices can be looked at."""
    return prod(len(of_table) for of_table in choices) <= MAX_COMBINATIONS


def _proposals(choices: Sequence[Sequence[Choice]], totals: Totals, room: Room) -> list[Placement]:
    """Return some placements, the best first: those of the lowest prices at which there is room, and of higher ones.

    Or of all combinations, where they are few.
    """
    found: list[Placement] = []
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


def _all_prices(room: Room) -> Iterator[tuple[float, float]]:
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


def pack(choices: Sequence[Sequence[Choice]], picked: NDArray[np.intp], room: Room) -> list[Placement]:
    """Return placements of the picked choices, largest first, by time and by memory: those that find room."""
    found: list[Placement] = []
    for by_memory in (False, True):
        placement = Placement(choices, room)
        for table in _order(choices, picked, by_memory):
            choice = choices[table][picked[table]]
            ranks = placement.find_ranks(choice, by_memory)
            if ranks is None:
                break
            placement.put(table, int(picked[table]), ranks)
        else:
            found.append(placement)
    return found


def _order(choices: Sequence[Sequence[Choice]], picked: NDArray[np.intp], by_memory: bool) -> list[int]:
    """Return tables in the order in which they are placed: those on all ranks, then those with most for one rank."""

    def size(table: int) -> tuple[bool, float]:
        choice = choices[table][picked[table]]
        largest = choice.device_bytes + choice.host_bytes if by_memory else choice.milliseconds
        return choice.cut in EVERY_RANK, float(largest.max())

    return sorted(range(len(choices)), key=size, reverse=True)


def polish(placement: Placement, effort: Effort, level: bool) -> Placement:
    """Move tables of the slowest rank, one by one, while that makes it faster. Changes `placement`, and returns it.

    level: first let it get slower where all ranks together get more level, from where more moves are open.
    """
    for helps in (_is_more_level, _is_better) if level else (_is_better,):
        while effort.left > 0 and (_move_one(placement, effort, helps) or _swap_one(placement, effort)):
            pass
    _count_anew(placement)
    return placement


def _steep(milliseconds: NDArray[np.float64], unit: float) -> float:
    return float(((milliseconds / unit) ** STEEPNESS).sum())


def _on_slowest(placement: Placement) -> list[int]:
    """Return the tables with a shard on the slowest rank, those that take most of its time first."""
    slowest = int(placement.milliseconds.argmax())
    found: list[tuple[float, int]] = []
    for table, ranks in enumerate(placement.ranks):
        choice = placement.choice(table)
        if choice.cut in EVERY_RANK:
            found.append((float(choice.milliseconds[slowest]), table))
        elif (here := ranks == slowest).any():
            found.append((float(choice.milliseconds[here].sum()), table))
    return [table for _, table in sorted(found, key=lambda pair: (-pair[0], pair[1]))]


def _move_one(placement: Placement, effort: Effort, helps: Callable[[Rating, Rating], bool]) -> bool:
    """Give a table of the slowest rank another place or choice, where that helps; returns whether it did."""
    unit = placement.critical_path
    if unit <= 0:
        return False
    before = (unit, _steep(placement.milliseconds, unit))
    for table in _on_slowest(placement):
        old = placement.take(table)
        ways = [way for way in _ways(placement, table, unit, effort) if helps(way[:2], before)]
        if ways:
            _, _, number, ranks = min(ways, key=lambda way: way[:2] if helps is _is_better else way[1:2])
            placement.put(table, number, ranks)
            return True
        placement.put(table, *old)
        if effort.left <= 0:
            return False
    return False


def _is_more_level(one: Rating, other: Rating) -> bool:
    """Return whether ranks' times are less steep."""
    return one[1] < other[1] * (1 - 1e-9)


def _is_better(one: Rating, other: Rating) -> bool:
    """Return whether a critical path is shorter, or the same with ranks' times that are less steep."""
    return one[0] < other[0] * (1 - 1e-9) or (one[0] <= other[0] * (1 + 1e-12) and one[1] < other[1] * (1 - 1e-9))


def _swap_one(placement: Placement, effort: Effort) -> bool:
    """Let a table of the slowest rank and one of another change places, where that helps; returns whether it did.

    Tables on one rank each.
    """
    slowest = int(placement.milliseconds.argmax())
    alone = [t for t, ranks in enumerate(placement.ranks) if len(ranks) == 1]
    mine = [t for t in alone if placement.ranks[t][0] == slowest]
    others = np.asarray([t for t in alone if placement.ranks[t][0] != slowest], dtype=np.intp)
    if not mine or not len(others):
        return False
    there = np.asarray([placement.ranks[t][0] for t in others])
    time, device, host = (
        np.asarray([getattr(placement.choice(t), of)[0] for t in others])
        for of in ("milliseconds", "device_bytes", "host_bytes")
    )
    now = placement.critical_path
    for table in mine:
        if not effort.spend():
            return False
        choice = placement.choice(table)
        more, more_device, more_host = choice.milliseconds[0], choice.device_bytes[0], choice.host_bytes[0]
        worst = np.maximum(now - more + time, placement.milliseconds[there] + more - time)
        fits = (placement.device_left[there] + device >= more_device) & (placement.host_left[there] + host >= more_host)
        fits &= (placement.device_left[slowest] + more_device >= device) & (
            placement.host_left[slowest] + more_host >= host
        )
        worst = np.where(fits, worst, np.inf)
        other = int(worst.argmin())
        if worst[other] < now * (1 - 1e-9):
            _swap(placement, table, int(others[other]))
            return True
    return False


def _swap(placement: Placement, one: int, other: int) -> None:
    number, ranks = placement.take(one)
    other_number, other_ranks = placement.take(other)
    placement.put(one, number, other_ranks)
    placement.put(other, other_number, ranks)


def _thrown_about(placement: Placement, draw: np.random.Generator, effort: Effort) -> Placement | None:
    """Return a copy from which some tables were taken, and placed again in another order; None where one found no room.

    Each gets the choice that adds least, and now and then the next best, so that others find their places.
    """
    twin = placement.copy()
    unit = twin.critical_path
    num_tables = len(twin.choices)
    pressing = _on_slowest(twin)
    count = int(draw.integers(2, 4 + min(num_tables, 4 + num_tables // 20)))
    tables = set(draw.choice(pressing, size=min(len(pressing), 1 + count // 2), replace=False).tolist())
    tables |= set(draw.integers(0, num_tables, size=count).tolist())
    order = draw.permutation(sorted(tables)).tolist()
    for table in order:
        twin.take(table)
    for table in order:
        found = sorted(_ways(twin, table, unit, effort), key=lambda way: way[1])
        if not found:
            return None
        _, _, number, ranks = found[min(int(draw.geometric(0.8)) - 1, len(found) - 1)]
        twin.put(table, number, ranks)
    return twin


def _ways(placement: Placement, table: int, unit: float, effort: Effort) -> list[tuple[float, float, int, Ranks]]:
    """Return what comes of each choice of a table that is on no rank: critical path, how steep, the choice, its ranks.

    Of choices that take less time than `unit` on every rank, where there are any.
    """
    found: list[tuple[float, float, int, Ranks]] = []
    choices = placement.choices[table]
    short = [number for number, choice in enumerate(choices) if float(choice.milliseconds.max()) <= unit]
    for number in short or range(len(choices)):
        ranks = placement.find_ranks(choices[number])
        if ranks is None or not effort.spend():
            continue
        placement.put(table, number, ranks)
        found.append((placement.critical_path, _steep(placement.milliseconds, unit), number, ranks))
        placement.take(table)
    return found


def _count_anew(placement: Placement) -> None:
    """Add the ranks' times up again, without the rounding of all moves."""
    placement.milliseconds = np.zeros(placement.room.num_ranks)
    for table, ranks in enumerate(placement.ranks):
        np.add.at(placement.milliseconds, ranks, placement.choice(table).milliseconds)
