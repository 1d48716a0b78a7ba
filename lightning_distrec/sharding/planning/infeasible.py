"""Why tables find no room: the proof, the table that does not fit, and by how many bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_distrec.sharding.planning.partial_plan import MemoryBudget, PartialPlan, Ranks
from lightning_distrec.sharding.planning.sharding_options import EstimatedOption
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES

WEIGHTS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0, 0.1), (0.1, 1.0))
"""How device and host memory are added up, in search of a sum that is too large; any weights prove it."""
MAX_TRIES = 20_000
"""Placements of single tables that are tried before it is left open whether there is a way."""


MAX_WAYS = 200
"""Ways to place the shards of one table that are told apart."""
MAX_TABLES, MAX_RANKS = 60, 64
"""Beyond these, all ways are too many in any case."""


@dataclass(frozen=True)
class InfeasiblePlan:
    """A table without room."""

    table: int
    missing_bytes: int
    """What its smallest shards would need beyond what there is."""
    proven: bool
    """Whether no plan can exist; else none was found."""
    why: str
    """In words, for behind "table 'x' "."""


def fits_alone(choice: EstimatedOption, room: MemoryBudget) -> bool:
    """Return whether the choice finds room while all ranks are empty."""
    return PartialPlan([[choice]], room).find_ranks(choice) is not None


def no_choice_fits(choices: Sequence[EstimatedOption], table: int, room: MemoryBudget) -> InfeasiblePlan:
    """Return by how much a table, of which no choice fits on empty ranks, is too large."""
    closest = min(choices, key=lambda choice: max(_missing(choice, room)))
    of_one, together = _missing(closest, room)
    needs, has = f"{closest.device_bytes.max():,} bytes", f"{room.device_bytes.max():,}"
    if room.host_bytes.any():
        needs += f" of its GPU's memory and {closest.host_bytes.max():,} of its host's"
        has += f" and {room.host_bytes.max():,}"
    return InfeasiblePlan(
        table,
        max(of_one, together),
        proven=True,
        why=f"fits on no rank: even {closest.cut} ({closest.kernel}) a rank needs {needs} for its rows, their update "
        f"and exchange, and has {has}: {max(of_one, together):,} too few"
        f"{' for all its shards' if together > of_one else ''}",
    )


def _missing(choice: EstimatedOption, room: MemoryBudget) -> tuple[int, int]:
    """Return how many bytes the choice's shards lack on empty ranks, at the least: the largest by itself, and all."""
    most_device, most_host = room.device_bytes.max(), room.host_bytes.max()
    if choice.cut in EVERY_RANK_TYPES:
        most_device, most_host = room.device_bytes, room.host_bytes
    of_one = max(0, int((choice.device_bytes - most_device).max())) + max(0, int((choice.host_bytes - most_host).max()))
    ranks = room.ranks_on_node if choice.cut in ("table_row_wise", "table_column_wise") else room.num_ranks
    there = np.sort(room.device_bytes)[-ranks:].sum(), np.sort(room.host_bytes)[-ranks:].sum()
    together = max(0, int(choice.device_bytes.sum() - there[0])) + max(0, int(choice.host_bytes.sum() - there[1]))
    return of_one, together


def too_much_together(choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget) -> InfeasiblePlan | None:
    """Return a shortage where all tables, each in the way that takes least, take more than all ranks have."""
    for device, host in WEIGHTS:
        sizes = np.array([
            min(device * c.device_bytes.sum() + host * c.host_bytes.sum() for c in of_table) for of_table in choices
        ])
        there = device * room.device_bytes.sum() + host * room.host_bytes.sum()
        if (missing := int(np.ceil(sizes.sum() - there))) > 0:
            kind = {(1.0, 0.0): " of device memory", (0.0, 1.0): " of host memory"}.get((device, host), "")
            return InfeasiblePlan(
                int(sizes.argmax()),
                missing,
                proven=True,
                why=f"is the largest of tables that need {int(sizes.sum()):,} bytes{kind} together at the least, and "
                f"all ranks have {int(there):,}: {missing:,} too few",
            )
    return None


def try_all(choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget) -> PartialPlan | InfeasiblePlan:
    """Return a placement, whatever its speed; else the table that fitted last, and whether all ways were tried.

    Tables are placed largest first; of ranks that are alike only one is tried. For many tables or ranks, only the
    first way is.
    """
    least = [min(int((c.device_bytes + c.host_bytes).sum()) for c in of_table) for of_table in choices]
    order = sorted(range(len(choices)), key=lambda t: -least[t])
    tries = _Tries(choices, room, order)
    return tries.run() if len(choices) <= MAX_TABLES and room.num_ranks <= MAX_RANKS else tries.first_way()


def _roles(choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget) -> list[int]:
    """Return equal numbers for ranks that get shards of equal size from all cuts that go by the rank's number."""
    by_number: list[list[int]] = [[] for _ in range(room.num_ranks)]
    for choice in (choice for of_table in choices for choice in of_table):
        if choice.cut in EVERY_RANK_TYPES or choice.cut == "table_row_wise":
            for rank, role in enumerate(by_number):
                role.append(int(choice.which[rank % len(choice.which)]))
    known: dict[tuple[int, ...], int] = {}
    return [known.setdefault(tuple(role), len(known)) for role in by_number]


class _Tries:
    """Depth-first search for room."""

    def __init__(self, choices: Sequence[Sequence[EstimatedOption]], room: MemoryBudget, order: list[int]) -> None:
        self.placement = PartialPlan(choices, room)
        self.order = order
        self.left = MAX_TRIES
        self.all_tried = True
        self.roles = _roles(choices, room)
        self.deepest = -1
        self.missing = 0

    def run(self) -> PartialPlan | InfeasiblePlan:
        """Return what is found."""
        return self.placement if self._place(0) else self._shortage()

    def _shortage(self) -> InfeasiblePlan:
        tried = (
            "all ways to place it beside the others were tried"
            if self.all_tried
            else "no place beside the others was found"
        )
        return InfeasiblePlan(
            self.order[self.deepest],
            self.missing,
            self.all_tried,
            f"finds no room: {tried}; {self.missing:,} bytes are missing where it came closest",
        )

    def first_way(self) -> InfeasiblePlan | PartialPlan:
        """Return what comes of placing each table where most memory is left, in the way that takes least."""
        self.all_tried = False
        for depth, table in enumerate(self.order):
            choices = self.placement.choices[table]
            for number in self._by_size(choices):
                if (ranks := self.placement.find_ranks(choices[number], by_memory=True)) is not None:
                    self.placement.put(table, number, ranks)
                    break
            else:
                self._note(depth, choices)
                return self._shortage()
        return self.placement

    def _place(self, depth: int) -> bool:
        if depth == len(self.order):
            return True
        table = self.order[depth]
        choices = self.placement.choices[table]
        for number in self._by_size(choices):
            for ranks in self._ways(choices[number]):
                self.left -= 1
                if self.left <= 0:
                    self.all_tried = False
                    return False
                self.placement.put(table, number, ranks)
                if self._place(depth + 1):
                    return True
                self.placement.take(table)
        self._note(depth, choices)
        return False

    @staticmethod
    def _by_size(choices: Sequence[EstimatedOption]) -> list[int]:
        return sorted(range(len(choices)), key=lambda c: int(choices[c].device_bytes.sum()))

    def _note(self, depth: int, choices: Sequence[EstimatedOption]) -> None:
        """Remember the table that could not be placed with most others on their ranks."""
        here = self.placement
        left = MemoryBudget(here.device_left, here.host_left, here.room.ranks_on_node)
        missing = max(1, min(max(_missing(choice, left)) for choice in choices))
        if depth > self.deepest or (depth == self.deepest and missing < self.missing):
            self.deepest, self.missing = depth, missing

    def _ways(self, choice: EstimatedOption) -> list[Ranks]:
        """Return ranks for the choice's shards: all ways that differ."""
        here, on_node = self.placement, self.placement.room.ranks_on_node
        if choice.cut in EVERY_RANK_TYPES:
            ranks = here.find_ranks(choice)
            return [] if ranks is None else [ranks]
        if choice.cut == "table_row_wise":
            nodes = [np.arange(start, start + on_node) for start in range(0, here.room.num_ranks, on_node)]
            fitting = [ranks for ranks in nodes if self._fits(choice, ranks)]
            return list({self._of_node(int(ranks[0])): ranks for ranks in fitting}.values())
        return self._each_shard(choice, one_node=choice.cut == "table_column_wise")

    def _fits(self, choice: EstimatedOption, ranks: Ranks) -> bool:
        here = self.placement
        return bool(
            (choice.device_bytes <= here.device_left[ranks]).all()
            and (choice.host_bytes <= here.host_left[ranks]).all()
        )

    def _of_rank(self, rank: int) -> tuple[int, int, int]:
        """Return all that tells a rank from others of its node."""
        return self.roles[rank], int(self.placement.device_left[rank]), int(self.placement.host_left[rank])

    def _of_node(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Return what is alike for nodes that are as good as the rank's."""
        on_node = self.placement.room.ranks_on_node
        start = rank - rank % on_node
        return tuple(sorted(self._of_rank(other) for other in range(start, start + on_node)))

    def _each_shard(self, choice: EstimatedOption, one_node: bool) -> list[Ranks]:
        """Return all unlike ways to give each shard a rank."""
        here, on_node = self.placement, self.placement.room.ranks_on_node
        ways: list[list[int]] = [[]]
        for i in range(len(choice.which)):
            longer: dict[tuple[object, ...], list[int]] = {}
            for way in ways:
                for rank in range(here.room.num_ranks):
                    if one_node and way and rank // on_node != way[0] // on_node:
                        continue
                    more = [*way, rank]
                    at = np.asarray(more, dtype=np.intp)
                    on_device = choice.device_bytes[: i + 1][at == rank].sum()
                    on_host = choice.host_bytes[: i + 1][at == rank].sum()
                    if on_device > here.device_left[rank] or on_host > here.host_left[rank]:
                        continue
                    longer.setdefault(self._kind(more), more)
                if len(longer) > MAX_WAYS:
                    self.all_tried = False
                    break
            ways = list(longer.values())
        return [np.asarray(way, dtype=np.intp) for way in ways]

    def _kind(self, way: list[int]) -> tuple[object, ...]:
        """Return what is alike for ways that differ only in which of some equal ranks they name."""
        on_node = self.placement.room.ranks_on_node
        names: dict[int, int] = {}
        nodes: dict[int, int] = {}
        return tuple(
            (
                names.setdefault(rank, len(names)),
                nodes.setdefault(rank // on_node, len(nodes)),
                self._of_rank(rank),
                self._of_node(rank),
            )
            for rank in way
        )
