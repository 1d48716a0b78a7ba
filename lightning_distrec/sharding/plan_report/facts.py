"""A plan with what it was made from: what its page and its pictures tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.planning.held_memory import held_bytes
from lightning_distrec.sharding.planning.plan_cost import PlanCost
from lightning_distrec.sharding.planning.planned_tables import PlannedTable
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.planning.traffic import Traffic, estimate_traffic
from lightning_distrec.sharding.quantized_comms import QuantizedComms

Origin = tuple[str, str, str]
"""What, its value, and where that came from."""


@dataclass(frozen=True, kw_only=True)
class MemoryOfRanks:
    """Memory of one kind. Shapes: R ranks."""

    tables: NDArray[np.int64]
    """(R,): bytes for tables, and where the planner has reckoned it, for their exchange."""
    usable: NDArray[np.int64]
    """(R,): bytes there are for that."""
    capacity: NDArray[np.int64]
    """(R,): bytes there are in all; what is not usable is reserved for all else."""

    @property
    def worst(self) -> int:
        """The rank with the least left."""
        return int((self.usable - self.tables).argmin())

    @property
    def fits(self) -> bool:
        """Whether every rank has what it needs."""
        return bool((self.tables <= self.usable).all())


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """A plan with what it was made from."""

    tables: Sequence[PlannedTable]
    places: NodeLayout
    batch_size: int
    """Examples per rank and step."""
    comms: QuantizedComms
    memory_bytes: int | Sequence[int]
    """What a rank, or each, has: on its GPU, or of its host's where tables train on CPU."""
    usable_bytes: int | Sequence[int]
    """What of it is for tables, where `cost` does not say it."""
    on_gpu: bool = False
    cost: PlanCost | None = None
    """The planner's estimates; None: not known, and neither is the time of a step."""
    origins: Sequence[Origin] = ()

    @cached_property
    def traffic(self) -> Traffic:
        """What the ranks send in a training step."""
        return estimate_traffic(self.tables, self.places, self.batch_size, self.comms)

    @cached_property
    def memory(self) -> MemoryOfRanks:
        """The memory that tables are in: the GPU's, or the host's where they train on CPU."""
        ranks = self.places.num_ranks
        capacity = np.broadcast_to(np.asarray(self.memory_bytes, dtype=np.int64), ranks)
        if self.cost is not None:
            usable = np.minimum(self.cost.device_bytes_usable, capacity)
            return MemoryOfRanks(tables=self.cost.device_bytes, usable=usable, capacity=capacity)
        usable = np.broadcast_to(np.asarray(self.usable_bytes, dtype=np.int64), ranks)
        return MemoryOfRanks(tables=held_bytes(self.tables, ranks), usable=usable, capacity=capacity)

    @cached_property
    def host_memory(self) -> MemoryOfRanks | None:
        """The host's memory, for tables that a GPU reads from there; None where there are none."""
        ranks = self.places.num_ranks
        if self.cost is not None:
            if not self.cost.host_bytes.any():
                return None
            usable = self.cost.host_bytes_usable
            return MemoryOfRanks(tables=self.cost.host_bytes, usable=usable, capacity=usable)
        held = held_bytes(self.tables, ranks, on_host=True)
        # How much the host has is the planner's to say.
        return MemoryOfRanks(tables=held, usable=held, capacity=held) if held.any() else None

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs."""
        return self.memory.fits and (self.host_memory is None or self.host_memory.fits)
