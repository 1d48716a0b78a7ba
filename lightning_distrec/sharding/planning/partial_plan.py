"""Tables on ranks while a plan is searched: what is chosen for each, and what every rank then has to do and hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.sharding_options import EstimatedOption
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES

Ranks = NDArray[np.intp]
"""(S,): the rank of each shard of a choice."""


@dataclass(frozen=True)
class MemoryBudget:
    """What tables may take of every rank. R is the number of ranks."""

    device_bytes: NDArray[np.int64]
    """(R,)."""
    host_bytes: NDArray[np.int64]
    """(R,)."""
    ranks_on_node: int
    """Ranks of a node, for the cuts that give a table to one node."""

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.device_bytes)


class PartialPlan:
    """A choice for each table, and a rank for each of its shards."""

    def __init__(self, choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget) -> None:
        self.choices = choices
        self.room = room
        self.chosen: list[int] = [-1] * len(choices)
        """Number of the choice of each table; -1 while it is on no rank."""
        self.ranks: list[Ranks] = [np.empty(0, dtype=np.intp)] * len(choices)
        self.milliseconds = np.zeros(room.num_ranks)
        """(R,)."""
        self.device_left = room.device_bytes.copy()
        """(R,): what is left of the room."""
        self.host_left = room.host_bytes.copy()
        """(R,)."""

    def copy(self) -> "PartialPlan":
        """Return a placement that can be changed by itself."""
        twin = PartialPlan.__new__(PartialPlan)
        twin.choices, twin.room = self.choices, self.room
        twin.chosen, twin.ranks = list(self.chosen), list(self.ranks)
        twin.milliseconds = self.milliseconds.copy()
        twin.device_left, twin.host_left = self.device_left.copy(), self.host_left.copy()
        return twin

    @property
    def critical_path(self) -> float:
        """Milliseconds of the slowest rank."""
        return float(self.milliseconds.max())

    def choice(self, table: int) -> EstimatedOption:
        """Return what is chosen for a table that is placed."""
        return self.choices[table][self.chosen[table]]

    def put(self, table: int, number: int, ranks: Ranks) -> None:
        """Place a table that is on no rank. ranks: see `find_ranks`."""
        self._count(self.choices[table][number], ranks, 1)
        self.chosen[table], self.ranks[table] = number, ranks

    def take(self, table: int) -> tuple[int, Ranks]:
        """Take a table off its ranks; returns what `put` takes to undo it."""
        number, ranks = self.chosen[table], self.ranks[table]
        self._count(self.choices[table][number], ranks, -1)
        self.chosen[table] = -1
        return number, ranks

    def _count(self, choice: EstimatedOption, ranks: Ranks, sign: int) -> None:
        if choice.cut in EVERY_RANK_TYPES:
            self.milliseconds += sign * choice.milliseconds
            self.device_left -= sign * choice.device_bytes
            self.host_left -= sign * choice.host_bytes
        else:
            np.add.at(self.milliseconds, ranks, sign * choice.milliseconds)
            np.subtract.at(self.device_left, ranks, sign * choice.device_bytes)
            np.subtract.at(self.host_left, ranks, sign * choice.host_bytes)

    def find_ranks(self, choice: EstimatedOption, by_memory: bool = False) -> Ranks | None:
        """Return ranks with room for the choice's shards, those with least to do; None where there are none.

        by_memory: those with most memory left instead.
        """
        if choice.cut in EVERY_RANK_TYPES:
            fits = bool((choice.device_bytes <= self.device_left).all() and (choice.host_bytes <= self.host_left).all())
            return np.arange(self.room.num_ranks) if fits else None
        if choice.cut == "table_row_wise":
            return self._node_in_order(choice, by_memory)
        if choice.cut == "table_column_wise":
            return self._on_one_node(choice, by_memory)
        return self._anywhere(choice, 0, self.room.num_ranks, by_memory)

    def _anywhere(self, choice: EstimatedOption, start: int, stop: int, by_memory: bool) -> Ranks | None:
        """Return a rank of start..stop for each shard."""
        ranks = np.empty(len(choice.which), dtype=np.intp)
        busy = self.milliseconds[start:stop]
        device, host = self.device_left[start:stop], self.host_left[start:stop]
        if len(ranks) > 1:
            busy, device, host = busy.copy(), device.copy(), host.copy()
        for i, (time, on_device, on_host) in enumerate(
            zip(choice.milliseconds, choice.device_bytes, choice.host_bytes, strict=True)
        ):
            fits = (device >= on_device) & (host >= on_host)
            rank = int(np.where(fits, -(device + host) if by_memory else busy, np.inf).argmin())
            if not fits[rank]:
                return None
            ranks[i] = start + rank
            if len(ranks) > 1:
                busy[rank] += time
                device[rank] -= on_device
                host[rank] -= on_host
        return ranks

    def _node_in_order(self, choice: EstimatedOption, by_memory: bool) -> Ranks | None:
        """Return the ranks of one node: the first shard goes to its first rank, and so on."""
        on_node = self.room.ranks_on_node
        device, host = self.device_left.reshape(-1, on_node), self.host_left.reshape(-1, on_node)
        fits = ((device >= choice.device_bytes) & (host >= choice.host_bytes)).all(axis=1)
        then = (self.milliseconds.reshape(-1, on_node) + choice.milliseconds).max(axis=1)
        if by_memory:
            then = -(device + host).min(axis=1)
        node = int(np.where(fits, then, np.inf).argmin())
        return node * on_node + np.arange(on_node) if fits[node] else None

    def _on_one_node(self, choice: EstimatedOption, by_memory: bool) -> Ranks | None:
        """Return ranks of one node: the one with least to do whose ranks have room."""
        on_node = self.room.ranks_on_node
        load = -(self.device_left + self.host_left) if by_memory else self.milliseconds
        for node in np.argsort(load.reshape(-1, on_node).sum(axis=1), kind="stable"):
            ranks = self._anywhere(choice, int(node) * on_node, (int(node) + 1) * on_node, by_memory)
            if ranks is not None:
                return ranks
        return None
