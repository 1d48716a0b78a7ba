"""Searches for the plan whose slowest rank has the least work: proposals by prices of memory, then
moves of tables.

A table's options differ in time and memory. For given prices of memory and a limit on one shard's
time, the best option of each table is known at once; packing the chosen shards, largest first, onto
the ranks with the least work gives a proposal. The best proposals are then improved: tables that
the critical path waits for move, one at a time; and several random tables are put again at once, to
leave a plan that no single move improves.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.partial_plan import MemoryBudget, PartialPlan, Ranks
from lightning_distrec.sharding.planning.sharding_options import EstimatedOption
from lightning_distrec.sharding.sharders import EVERY_RANK_TYPES, ONE_NODE_TYPES

Options = Sequence[Sequence[EstimatedOption]]
"""The options of each table."""

PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
"""The price of all memory of a kind, in units of all time that the tables need."""
NUM_PRICES = 6
"""Number of prices that are tried from the first on at which tables fit."""
NUM_STARTS = 4
"""Number of proposals that are improved."""
NUM_LIMITS = 10
"""Number of limits on one shard's time that are tried at each price."""
GOOD_ENOUGH = 1.003
"""The search stops at this multiple of the lower bound: estimates of times are less exact by
far."""
MOVES = 32_000
"""Moves of a search at most. For 1,000 tables on 512 ranks 5,000 end at 1.26 of the lower bound;
these at 1.08, 2 s later."""
MOVES_PER_MILLISECOND = 2_000_000
"""The search stops when it has made this many moves for each millisecond that the critical path is
above the lower bound: the moves have taken what 100,000 steps could gain at most."""
SQUARINGS = 4
"""Times are added up in their 16th power, to see progress while several ranks or links are equally
slow."""
BOUND_SHARES = np.linspace(0, 1, 5)
"""Shares of the mean over ranks, the rest being the longest shard, whose sums are tried as lower
bounds."""


class Totals:
    """Sums over the shards of every option, as arrays of (tables, largest number of options)."""

    def __init__(self, options: Options, budget: MemoryBudget) -> None:
        shape = (len(options), max(map(len, options)))
        # Tables have unequal numbers of options; those that do not exist take infinite time, so
        # that none is chosen.
        self.time = np.full(shape, np.inf)
        self.longest = np.full(shape, np.inf)
        self.device = np.zeros(shape)
        self.host = np.zeros(shape)
        num_ranks = budget.num_ranks
        num_links = PartialPlan(options, budget).num_links
        # Of each exchange and of compute: the mean over links or ranks, and what one of them takes
        # at least.
        means = np.zeros((4, *shape))
        peaks = np.full((4, *shape), np.inf)
        types = sorted({
            option.sharding_type for table_options in options for option in table_options
        })
        self.with_type = {kind: np.zeros(shape, dtype=bool) for kind in types}
        """Sharding type -> (tables, largest number of options): the options that have it."""
        for t, table_options in enumerate(options):
            for o, option in enumerate(table_options):
                # An exchange takes as long as the links carry it together, also where there are
                # fewer than ranks.
                means[:, t, o] = (
                    *(option.exchange.sum(axis=1) / num_links),
                    option.compute.sum() / num_ranks,
                )
                peaks[:, t, o] = *_link_peaks(option, num_ranks, num_links), option.compute.max()
                self.time[t, o] = means[:, t, o].sum() * num_ranks
                self.longest[t, o] = option.milliseconds.max()
                self.device[t, o] = option.device_bytes.sum()
                self.host[t, o] = option.host_bytes.sum()
                self.with_type[option.sharding_type][t, o] = True
        self.min_time = float(self.time.min(axis=1).sum())
        """Milliseconds of all tables on all ranks together, with the fastest option of each."""
        bounded_parts = ([3], [0, 1, 2], [0, 1, 2, 3])
        self.lower_bound = max(_lower_bound(means, peaks, parts) for parts in bounded_parts)
        """No plan has a shorter critical path than this."""

    def best_options(
        self, prices: tuple[float, float], limit: float, sharding_type: str, budget: MemoryBudget
    ) -> NDArray[np.intp]:
        """Return each table's best option at these prices of memory (device, host), none of its
        shards over `limit`.

        A table without such an option gets the one whose longest shard is shortest. sharding_type:
        that of all tables that can have it; "" for any.
        """
        cost = self.time / (self.min_time or 1.0)
        for price, used, available in zip(
            prices, (self.device, self.host), (budget.device_bytes, budget.host_bytes), strict=True
        ):
            cost = cost + price * used / max(1.0, float(available.sum()))
        # Added to costs of about 1: an option over the limit comes after all others, one of another
        # type after those. Among them the shortest shard wins, so that every table has some option.
        cost = np.where(self.longest <= limit, cost, 1e12 + self.longest)
        if sharding_type:
            cost = np.where(self.with_type[sharding_type], cost, 1e24 + cost)
        best: NDArray[np.intp] = np.where(np.isfinite(self.time), cost, np.inf).argmin(axis=1)
        return best


def _link_peaks(option: EstimatedOption, num_ranks: int, num_links: int) -> NDArray[np.float64]:
    """Return, (3,), what the slowest link carries of an option at least in each exchange."""
    if num_links < num_ranks and option.sharding_type in ONE_NODE_TYPES:
        peaks = option.exchange.sum(axis=1)
    elif option.sharding_type in EVERY_RANK_TYPES:
        peaks = option.exchange.reshape(3, num_links, -1).sum(axis=2).max(axis=1)
    else:
        peaks = option.exchange.max(axis=1)
    return peaks


def _lower_bound(means: NDArray[np.float64], peaks: NDArray[np.float64], parts: list[int]) -> float:
    """Return milliseconds that no plan's critical path is below, by some of its parts; the others
    count by means.

    means, peaks: (4, tables, largest number of options). A plan takes the mean of each part, and no
    less than the peak of any of its options, and so no less than any weighted mean of the two. What
    a plan's largest peak is, is not
    known: all are tried. The least that plans with options up to that peak can take is added up,
    and the least is it.
    """
    peak = peaks[parts].sum(axis=0)
    part_means = means[parts].sum(axis=0)
    other_means = means.sum(axis=0) - part_means
    order = peak.argsort(axis=1, kind="stable")
    peak = np.take_along_axis(peak, order, 1)
    exists = np.isfinite(peak)
    # Below the shortest peak of some table there is no plan.
    tried = np.unique(np.maximum(peak[exists], peak[:, 0].max()))
    bounds = np.zeros_like(tried)
    for share in BOUND_SHARES:
        cost = np.minimum.accumulate(
            np.take_along_axis(share * part_means + other_means, order, 1), axis=1
        )
        # What all tables take at least with their options up to a peak: each next option may only
        # lower it.
        gains = np.diff(cost, axis=1, prepend=0)
        places = np.searchsorted(tried, peak[exists])
        sums = np.cumsum(np.bincount(places, gains[exists], minlength=len(tried)))
        bounds = np.maximum(bounds, (1 - share) * tried + sums)
    return float(bounds.min())


# ---------------------------------------------------------------------------------------- proposals


def proposals(options: Options, totals: Totals, budget: MemoryBudget) -> list[PartialPlan]:
    """Return up to `NUM_STARTS` plans, the best first; none where no proposal fits.

    They come from the lowest prices at which tables fit.
    """
    plans: list[PartialPlan] = []
    # Neighbouring prices often pick the same options, and packing these again would give the same
    # plans.
    seen: set[bytes] = set()
    remaining_prices = NUM_PRICES
    for prices in _all_prices(budget):
        for limit, sharding_type in _restrictions(totals):
            picked = totals.best_options(prices, limit, sharding_type, budget)
            if picked.tobytes() not in seen:
                seen.add(picked.tobytes())
                plans += pack(options, picked, budget)
        # Counted from the first price at which something fits: at lower ones the fast options need
        # too much memory.
        remaining_prices -= bool(plans)
        if remaining_prices == 0:
            break
    return sorted(plans, key=lambda plan: plan.critical_path)[:NUM_STARTS]


def _all_prices(budget: MemoryBudget) -> Iterator[tuple[float, float]]:
    """Yield prices of the device's and the host's memory, low ones first."""
    host_prices = PRICES if budget.host_bytes.any() else (0.0,)
    pairs = [(device, host) for device in PRICES for host in host_prices]
    yield from sorted(pairs, key=lambda pair: (max(pair), sum(pair)))


def _restrictions(totals: Totals) -> Iterator[tuple[float, str]]:
    """Yield limits on a shard's time, from none to the lower bound of a critical path; then each
    sharding type."""
    longest = totals.longest[np.isfinite(totals.longest)]
    lowest = max(totals.lower_bound, 1e-9)
    # Slightly more than the limit, or rounding would exclude the shard that defines it.
    limits = np.geomspace(max(float(longest.max()), lowest), lowest, NUM_LIMITS) * (1 + 1e-9)
    yield from ((float(limit), "") for limit in limits)
    yield from ((float(limits[0]), kind) for kind in totals.with_type)


def pack(options: Options, picked: NDArray[np.intp], budget: MemoryBudget) -> list[PartialPlan]:
    """Return plans with the picked options, packed largest first, by time and by memory: those that
    fit."""
    plans: list[PartialPlan] = []
    for prefer_memory in (False, True):
        plan = PartialPlan(options, budget)
        for table in _largest_first(options, picked, prefer_memory):
            ranks = plan.find_ranks(options[table][picked[table]], prefer_memory)
            if ranks is None:
                break
            plan.put(table, int(picked[table]), ranks)
        else:
            plans.append(plan)
    return plans


def _largest_first(options: Options, picked: NDArray[np.intp], prefer_memory: bool) -> list[int]:
    """Return tables in the order in which they are packed: those on all ranks, then by their
    largest shard."""

    def size(table: int) -> tuple[bool, float]:
        option = options[table][picked[table]]
        largest = option.device_bytes + option.host_bytes if prefer_memory else option.milliseconds
        return option.sharding_type in EVERY_RANK_TYPES, float(largest.max())

    return sorted(range(len(options)), key=size, reverse=True)


# -------------------------------------------------------------------------------------- improvement


class Search:
    """Improves plans by moves. Moves are counted, not timed, so that equal input gives equal
    plans."""

    def __init__(self, options: Options, seed: int) -> None:
        self._moves_left = MOVES
        self._max_failures = min(400, 60 * len(options))
        self._random = np.random.default_rng(seed)

    def improve(self, starts: Sequence[PartialPlan], lower_bound: float) -> PartialPlan:
        """Return the best plan that moves from `starts` lead to.

        lower_bound: no plan has a shorter critical path.
        """
        best = min(
            (self._polish(start.copy()) for start in starts), key=lambda plan: plan.critical_path
        )
        failures = 0
        while failures < self._max_failures and self._can_gain(best.critical_path, lower_bound):
            failures += 1
            tried = self._with_random_tables_moved(best)
            if tried is None:
                self._moves_left -= 1
            # A gain within rounding errors must not reset `failures`, or the search would go on
            # without progress.
            elif self._polish(tried).critical_path < best.critical_path * (1 - 1e-9):
                best = tried
                failures = 0
        return best

    def _can_gain(self, critical_path: float, lower_bound: float) -> bool:
        """Whether more moves may be worth what they cost."""
        worth = (critical_path - lower_bound * GOOD_ENOUGH) * MOVES_PER_MILLISECOND
        return MOVES - self._moves_left < min(worth, MOVES)

    def _polish(self, plan: PartialPlan) -> PartialPlan:
        """Move tables of the critical path, one by one, while that helps. Changes `plan`, and
        returns it."""
        while self._moves_left > 0 and self._move_one(plan):
            pass
        # Each move adds and subtracts floats;
        # without a recount their rounding errors would add up over thousands of moves.
        plan.recount()
        return plan

    def _move_one(self, plan: PartialPlan) -> bool:
        """Give a table of the critical path other ranks or another option; returns whether one
        helped."""
        unit = plan.critical_path
        if unit <= 0:
            return False
        steepness = float(_steepness(plan.times, plan.starts, unit))
        for table in plan.critical_tables():
            old = plan.take(table)
            moves = self._moves_of(plan, table, unit)
            best = min(moves, default=None, key=lambda move: move[:2])
            if best is not None and _is_better(best, unit, steepness):
                plan.put(table, best[2], best[3])
                return True
            plan.put(table, *old)
        return False

    def _moves_of(
        self, plan: PartialPlan, table: int, unit: float
    ) -> list[tuple[float, float, int, Ranks]]:
        """Return critical path, steepness, number and ranks of each option that takes up to `unit`
        on a rank."""
        options = plan.options[table]
        short = [number for number, option in enumerate(options) if option.longest <= unit]
        numbers: list[int] = []
        places: list[Ranks] = []
        loads = []
        tried: set[tuple[str, bytes]] = set()
        for number in short or range(len(options)):
            option = options[number]
            ranks = plan.find_ranks(option)
            if ranks is None:
                continue
            # Kernels come fastest first: on the same ranks none of the others is better.
            place = option.sharding_type, ranks.tobytes()
            if place not in tried:
                tried.add(place)
                self._moves_left -= 1
                numbers.append(number)
                places.append(ranks)
                loads.append(plan.load(option, ranks))
        if not places:
            return []
        # All at once: arrays are short, and numpy takes most of the time of a call to begin.
        times = plan.times + np.array(loads)
        paths = np.maximum.reduceat(times, plan.starts, axis=1).sum(axis=1)
        steepnesses = _steepness(times, plan.starts, unit)
        return list(zip(paths.tolist(), steepnesses.tolist(), numbers, places, strict=True))

    def _with_random_tables_moved(self, plan: PartialPlan) -> PartialPlan | None:
        """Return a copy in which some tables were put again in random order; None where one did not
        fit."""
        changed = plan.copy()
        unit = changed.critical_path
        num_tables = len(changed.options)
        slowest = changed.critical_tables()
        count = int(self._random.integers(2, 4 + min(num_tables, 4 + num_tables // 20)))
        # Some come from the critical path: while its tables stay, the critical path hardly gets
        # shorter.
        few = min(len(slowest), 1 + count // 2)
        tables = set(self._random.choice(slowest, size=few, replace=False).tolist())
        tables |= set(self._random.integers(0, num_tables, size=count).tolist())
        order = self._random.permutation(sorted(tables)).tolist()
        for table in order:
            changed.take(table)
        for table in order:
            moves = sorted(self._moves_of(changed, table, unit), key=lambda move: move[1])
            if not moves:
                return None
            # geometric(0.8) takes the best move in four of five cases, and the next ones ever less
            # often.
            _, _, number, ranks = moves[min(int(self._random.geometric(0.8)) - 1, len(moves) - 1)]
            changed.put(table, number, ranks)
        return changed


def _steepness(
    times: NDArray[np.float64], starts: NDArray[np.intp], unit: float
) -> NDArray[np.float64]:
    """Return about the critical path over `unit`, with a little of all ranks and links that are
    nearly as slow.

    times, starts: of a plan; or (moves, ...), of several.
    """
    powers = times / unit
    for _ in range(SQUARINGS):  # much faster than **
        powers *= powers
    sums = np.add.reduceat(powers, starts, axis=-1)
    steepness: NDArray[np.float64] = (sums ** (1 / 2**SQUARINGS)).sum(axis=-1)
    return steepness


def _is_better(move: tuple[float, float, int, Ranks], path: float, steepness: float) -> bool:
    """Return whether a move shortens the critical path, or keeps it and makes the ranks' times less
    steep."""
    # The margins are above the rounding errors of a few thousand moves: without them two equal
    # plans could alternate.
    if move[0] < path * (1 - 1e-9):
        return True
    return move[0] <= path * (1 + 1e-12) and move[1] < steepness * (1 - 1e-9)
