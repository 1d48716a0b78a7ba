"""Tables on ranks during the search: options, time and memory of every rank; and why tables do not
fit."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.sharding_options import EstimatedOption
from lightning_distrec.sharding.sharders import EVERY_RANK_TYPES, ONE_NODE_TYPES
from lightning_distrec.units import format_bytes

Ranks = NDArray[np.intp]
"""(S,): the rank of each shard of an option."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that tables may take of every rank. R is the number of ranks."""

    device_bytes: NDArray[np.int64]
    """(R,)."""
    host_bytes: NDArray[np.int64]
    """(R,)."""
    ranks_on_node: int
    """Ranks of a node, for the sharding types that give a table to one node."""

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.device_bytes)


class PartialPlan:
    """An option for each table, and a rank for each of its shards."""

    def __init__(self, options: Sequence[Sequence[EstimatedOption]], budget: MemoryBudget) -> None:
        self.options = options
        self.budget = budget
        self.option_numbers: list[int] = [-1] * len(options)
        """Number of the option of each table; -1 while the table is on no rank."""
        self.ranks: list[Ranks] = [np.empty(0, dtype=np.intp)] * len(options)
        num_ranks = budget.num_ranks
        on_node = budget.ranks_on_node
        self.num_links = num_ranks if num_ranks == on_node else num_ranks // on_node
        """How many links there are: one of each rank on one node, one of each node on several."""
        self.starts = np.cumsum([0, num_ranks, self.num_links, self.num_links])
        """(4,): where in `times` compute begins, and each exchange."""
        self.times: NDArray[np.float64] = np.zeros(num_ranks + 3 * self.num_links)
        """Milliseconds of each rank's shards without exchanges; then those of each exchange, over a
        rank's link on one node, over a node's on several."""
        self.device_left = budget.device_bytes.copy()
        """(R,): what is left of the budget."""
        self.host_left = budget.host_bytes.copy()
        """(R,)."""

    def copy(self) -> "PartialPlan":
        """Return an independent copy."""
        # Without __init__, which would make arrays only to replace them: the search copies plans
        # thousands of times. `_count` changes arrays in place, hence the copies; those in `ranks`
        # are only replaced.
        copied = copy(self)
        copied.option_numbers = list(self.option_numbers)
        copied.ranks = list(self.ranks)
        for name in ("times", "device_left", "host_left"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    @property
    def critical_path(self) -> float:
        """Milliseconds of a step: each exchange waits for the slowest."""
        return float(np.maximum.reduceat(self.times, self.starts).sum())

    @property
    def _parts(self) -> list[NDArray[np.float64]]:
        """Compute, and each exchange."""
        return np.split(self.times, self.starts[1:])

    @cached_property
    def milliseconds(self) -> NDArray[np.float64]:
        """(R,): each rank's compute, and the exchanges of its link; by it, ranks for further shards
        are found."""
        # On several nodes the ranks of a node share one link: a rank without shards there still
        # waits for it.
        compute, *exchange = self._parts
        on_links = np.sum(exchange, axis=0)[:, None]
        times: NDArray[np.float64] = (compute.reshape(self.num_links, -1) + on_links).ravel()
        return times

    def option_of(self, table: int) -> EstimatedOption:
        """Return the chosen option of a table that is on ranks."""
        return self.options[table][self.option_numbers[table]]

    def put(self, table: int, number: int, ranks: Ranks) -> None:
        """Put a table on ranks. ranks: see `find_ranks`."""
        self._count(self.options[table][number], ranks, 1)
        self.option_numbers[table] = number
        self.ranks[table] = ranks

    def take(self, table: int) -> tuple[int, Ranks]:
        """Take a table off its ranks; returns what `put` takes to undo it."""
        number = self.option_numbers[table]
        ranks = self.ranks[table]
        self._count(self.options[table][number], ranks, -1)
        self.option_numbers[table] = -1
        return number, ranks

    def _count(self, option: EstimatedOption, ranks: Ranks, sign: int) -> None:
        self.times += sign * self.load(option, ranks)
        vars(self).pop("milliseconds", None)
        # Several shards may be on one rank, of which an indexed `-=` would count only the last.
        np.subtract.at(self.device_left, ranks, sign * option.device_bytes)
        np.subtract.at(self.host_left, ranks, sign * option.host_bytes)

    def load(self, option: EstimatedOption, ranks: Ranks) -> NDArray[np.float64]:
        """Return what an option on these ranks adds to `times`."""
        if option.sharding_type in EVERY_RANK_TYPES:
            # Shard i is on rank i, so that plain sums do. On several nodes ranks share a link, on
            # which their times add up.
            exchange = option.exchange.reshape(3, self.num_links, -1).sum(axis=2)
            return np.concatenate([option.compute, exchange.ravel()])
        return self._sums(option.times, self._places(ranks))

    def _sums(self, times: NDArray[np.float64], places: Ranks) -> NDArray[np.float64]:
        return np.bincount(places.ravel(), times.ravel(), len(self.times)).astype(np.float64)

    def _places(self, ranks: Ranks) -> Ranks:
        """Return, (4, S), where in `times` shards on these ranks count."""
        links = ranks
        if self.num_links < self.budget.num_ranks:
            links = ranks // self.budget.ranks_on_node
        return np.array([ranks, links, links, links]) + self.starts[:, None]

    def find_ranks(self, option: EstimatedOption, prefer_memory: bool = False) -> Ranks | None:
        """Return ranks with memory for the option's shards, with least work or most memory; None:
        there are none."""
        if option.sharding_type in EVERY_RANK_TYPES:
            fits = bool(
                (option.device_bytes <= self.device_left).all()
                and (option.host_bytes <= self.host_left).all()
            )
            return np.arange(self.budget.num_ranks) if fits else None
        if option.sharding_type == "table_row_wise":
            return self._node_in_order(option, prefer_memory)
        if option.sharding_type == "table_column_wise":
            return self._on_one_node(option, prefer_memory)
        return self._anywhere(option, 0, self.budget.num_ranks, prefer_memory)

    def critical_tables(self) -> list[int]:
        """Return the tables that the critical path waits for, those that it gets shorter without
        the most first."""
        # All tables at once: a loop over them would take most of a search.
        times, places = self._all_times()
        slowest = self.starts + [part.argmax() for part in self._parts]
        times = (times * (places == slowest[:, None])).sum(axis=0)
        tables = np.repeat(np.arange(len(self.options)), list(map(len, self.ranks)))
        sums = np.bincount(tables, times, minlength=len(self.options))
        # Equal times are ordered by the table's number: equal input must give equal plans.
        return [table for table in np.argsort(-sums, kind="stable").tolist() if sums[table] > 0]

    def recount(self) -> None:
        """Add up the ranks' times again, without the rounding errors of all moves."""
        times, places = self._all_times()
        self.times = self._sums(times, places)
        vars(self).pop("milliseconds", None)

    def _all_times(self) -> tuple[NDArray[np.float64], Ranks]:
        """Return, each (4, all shards), their times and where in `times` they count."""
        times = [self.option_of(table).times for table in range(len(self.options))]
        return np.concatenate(times, axis=1), self._places(np.concatenate(self.ranks))

    def _anywhere(
        self, option: EstimatedOption, start: int, stop: int, prefer_memory: bool
    ) -> Ranks | None:
        """Return a rank of start..stop for each shard."""
        ranks = np.empty(len(option.size_numbers), dtype=np.intp)
        busy = self.milliseconds[start:stop]
        device = self.device_left[start:stop]
        host = self.host_left[start:stop]
        if len(ranks) > 1:
            # A table's own shards compete for work and memory too. With one shard nothing is
            # written, and views do.
            busy = busy.copy()
            device = device.copy()
            host = host.copy()
        for i, (time, on_device, on_host) in enumerate(
            zip(option.milliseconds, option.device_bytes, option.host_bytes, strict=True)
        ):
            fits = (device >= on_device) & (host >= on_host)
            rank = int(np.where(fits, -(device + host) if prefer_memory else busy, np.inf).argmin())
            # argmin over infinities alone returns 0, which does not fit either.
            if not fits[rank]:
                return None
            ranks[i] = start + rank
            if len(ranks) > 1:
                busy[rank] += time
                device[rank] -= on_device
                host[rank] -= on_host
        return ranks

    def _node_in_order(self, option: EstimatedOption, prefer_memory: bool) -> Ranks | None:
        """Return the ranks of one node: the first shard goes to its first rank, and so on."""
        on_node = self.budget.ranks_on_node
        device = self.device_left.reshape(-1, on_node)
        host = self.host_left.reshape(-1, on_node)
        # torchrec fixes which local rank has which block of a table_row_wise table: only the node
        # is free.
        fits = ((device >= option.device_bytes) & (host >= option.host_bytes)).all(axis=1)
        load = (self.milliseconds.reshape(-1, on_node) + option.compute).max(axis=1)
        if prefer_memory:
            load = -(device + host).min(axis=1)
        node = int(np.where(fits, load, np.inf).argmin())
        return node * on_node + np.arange(on_node) if fits[node] else None

    def _on_one_node(self, option: EstimatedOption, prefer_memory: bool) -> Ranks | None:
        """Return ranks of one node: the one with the least work whose ranks have memory."""
        on_node = self.budget.ranks_on_node
        load = -(self.device_left + self.host_left) if prefer_memory else self.milliseconds
        # The node with the least work may lack memory, then the next one is tried.
        # A stable sort keeps plans reproducible.
        for node in np.argsort(load.reshape(-1, on_node).sum(axis=1), kind="stable"):
            ranks = self._anywhere(
                option, int(node) * on_node, (int(node) + 1) * on_node, prefer_memory
            )
            if ranks is not None:
                return ranks
        return None


WEIGHTS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0, 0.1), (0.1, 1.0))
"""Weights of device and host memory, in search of a sum that is too large; any weights prove it."""


@dataclass(frozen=True)
class InfeasiblePlan:
    """A table that does not fit."""

    table: int
    proven: bool
    """Whether no plan can exist; otherwise none was found."""
    reason: str
    """The reason, to follow "table 'x' "."""


def no_option_fits(
    options: Sequence[EstimatedOption], table: int, budget: MemoryBudget
) -> InfeasiblePlan:
    """Return by how much a table, of which no option fits on empty ranks, is too large."""
    closest = min(options, key=lambda option: max(_missing(option, budget)))
    shard_lack, total_lack = _missing(closest, budget)
    needs = format_bytes(closest.device_bytes.max())
    has = format_bytes(budget.device_bytes.max())
    if budget.host_bytes.any():
        needs += f" of its GPU's memory and {format_bytes(closest.host_bytes.max())} of its host's"
        has += f" and {format_bytes(budget.host_bytes.max())}"
    return InfeasiblePlan(
        table,
        proven=True,
        reason=f"fits on no rank: even {closest.sharding_type} ({closest.kernel}) a rank needs "
        f"{needs} for its rows, their update and exchange, and has {has}: "
        f"{format_bytes(max(shard_lack, total_lack))} too "
        f"few{' for all its shards' if total_lack > shard_lack else ''}",
    )


def _missing(option: EstimatedOption, budget: MemoryBudget) -> tuple[int, int]:
    """Return how many bytes the option's shards lack at best on empty ranks: the largest by itself,
    and all."""
    # The largest memories are summed up: what these ranks lack, any other choice of ranks lacks
    # too.
    ranks = budget.ranks_on_node if option.sharding_type in ONE_NODE_TYPES else budget.num_ranks
    shard_lack = total_lack = 0
    for needed, memory in (
        (option.device_bytes, budget.device_bytes),
        (option.host_bytes, budget.host_bytes),
    ):
        per_shard = memory if option.sharding_type in EVERY_RANK_TYPES else memory.max()
        shard_lack += max(0, int((needed - per_shard).max()))
        total_lack += max(0, int(needed.sum() - np.sort(memory)[-ranks:].sum()))
    return shard_lack, total_lack


def _smallest_bytes(options: Sequence[EstimatedOption], device: float, host: float) -> float:
    """Return the least that an option takes. device, host: weights of the two memories."""
    return min(device * o.device_bytes.sum() + host * o.host_bytes.sum() for o in options)


def exceed_total_memory(
    options: Sequence[Sequence[EstimatedOption]], budget: MemoryBudget
) -> InfeasiblePlan | None:
    """Return a reason where all tables, each with its smallest option, need more memory than all
    ranks have."""
    for device, host in WEIGHTS:
        # No plan needs less than this weighted sum. One weighting under which it is too large
        # therefore is a proof.
        sizes = np.array([_smallest_bytes(choices, device, host) for choices in options])
        available = device * budget.device_bytes.sum() + host * budget.host_bytes.sum()
        missing = int(np.ceil(sizes.sum() - available))
        if missing > 0:
            kind = "" if host else " of device memory"
            if not device:
                kind = " of host memory"
            return InfeasiblePlan(
                int(sizes.argmax()),
                proven=True,
                reason="is the largest of tables that need at least "
                f"{format_bytes(sizes.sum())}{kind} together, and all ranks have "
                f"{format_bytes(available)}: {format_bytes(missing)} too few",
            )
    return None


def pack_by_memory(
    options: Sequence[Sequence[EstimatedOption]], budget: MemoryBudget
) -> PartialPlan | InfeasiblePlan:
    """Return a plan of any speed: tables by size, on the ranks with most memory; or the first one
    without room."""
    smallest = [_smallest_bytes(choices, 1, 1) for choices in options]
    plan = PartialPlan(options, budget)
    # Large tables come first, because small ones still fit into what remains.
    for table in sorted(range(len(options)), key=lambda t: -smallest[t]):
        sizes = [int(option.device_bytes.sum()) for option in options[table]]
        for number in sorted(range(len(sizes)), key=sizes.__getitem__):
            ranks = plan.find_ranks(options[table][number], prefer_memory=True)
            if ranks is not None:
                plan.put(table, number, ranks)
                break
        else:
            remaining = MemoryBudget(plan.device_left, plan.host_left, budget.ranks_on_node)
            # Shards may fit one by one and not at the same time;
            # then nothing counts as missing, and one byte is reported.
            missing = max(1, min(max(_missing(option, remaining)) for option in options[table]))
            reason = (
                f"does not fit next to the other tables: {format_bytes(missing)} are missing where "
                "it came closest"
            )
            return InfeasiblePlan(table, proven=False, reason=reason)
    return plan
