"""Moves that make a placement faster.

Tables of the slowest rank move, change their choice, or change places with tables of other ranks; and some tables are
thrown about at random, to leave where no single move helps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.partial_plan import PartialPlan, Ranks
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES

STEEPNESS = 16
"""Power in which ranks' times are added up, to see progress while several ranks are equally slow."""

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


def polish(placement: PartialPlan, effort: Effort, level: bool) -> PartialPlan:
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


def _on_slowest(placement: PartialPlan) -> list[int]:
    """Return the tables with a shard on the slowest rank, those that take most of its time first."""
    slowest = int(placement.milliseconds.argmax())
    found: list[tuple[float, int]] = []
    for table, ranks in enumerate(placement.ranks):
        choice = placement.choice(table)
        if choice.cut in EVERY_RANK_TYPES:
            found.append((float(choice.milliseconds[slowest]), table))
        elif (here := ranks == slowest).any():
            found.append((float(choice.milliseconds[here].sum()), table))
    return [table for _, table in sorted(found, key=lambda pair: (-pair[0], pair[1]))]


def _move_one(placement: PartialPlan, effort: Effort, helps: Callable[[Rating, Rating], bool]) -> bool:
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


def _swap_one(placement: PartialPlan, effort: Effort) -> bool:
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


def _swap(placement: PartialPlan, one: int, other: int) -> None:
    number, ranks = placement.take(one)
    other_number, other_ranks = placement.take(other)
    placement.put(one, number, other_ranks)
    placement.put(other, other_number, ranks)


def thrown_about(placement: PartialPlan, draw: np.random.Generator, effort: Effort) -> PartialPlan | None:
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


def _ways(placement: PartialPlan, table: int, unit: float, effort: Effort) -> list[tuple[float, float, int, Ranks]]:
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


def _count_anew(placement: PartialPlan) -> None:
    """Add the ranks' times up again, without the rounding of all moves."""
    placement.milliseconds = np.zeros(placement.room.num_ranks)
    for table, ranks in enumerate(placement.ranks):
        np.add.at(placement.milliseconds, ranks, placement.choice(table).milliseconds)
