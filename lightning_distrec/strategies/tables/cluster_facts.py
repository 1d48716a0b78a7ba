"""What planning needs to know besides tables: ranks, their memory, what is reserved of it, and bandwidths."""

import os
from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology

from lightning_distrec.sharding.planning.bandwidths import (
    AssumedBandwidths,
    BandwidthRequest,
    bandwidth_request,
    measured_bandwidths,
)
from lightning_distrec.sharding.planning.sharding_plan import Origin
from lightning_distrec.sharding.planning.topology import (
    RankMemory,
    Reservation,
    host_bytes_per_rank,
    make_topology,
    memory_bytes_per_rank,
    reservation_of,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.strategies.estimates.module_sizes import dense_bytes
from lightning_distrec.strategies.tables.decisions import Decisions
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs
from lightning_distrec.units import format_bandwidth, format_bytes


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """What planning needs to know of the ranks: with sharding_groups, of those of a group."""

    layout: NodeLayout
    topology: Topology
    """With the memory that tables may take."""
    devices: tuple[torch.device, ...]
    """Of each rank, as that rank names it."""
    memory: RankMemory
    """All of it."""
    memory_origin: str
    reservation: Reservation
    bandwidths: AssumedBandwidths
    names: tuple[str, ...]
    """The bandwidths that matter on these ranks."""
    batch_size: Origin
    """Examples per rank and step."""
    dense_bytes: int
    """Parameters, gradients and optimizer state of the layers without tables, on a rank."""

    @property
    def in_words(self) -> str:
        """One line for the start table: each value and where it came from."""
        memory = f"{self._memory_in_words} per rank ({self.memory_origin})"
        reserved = f"{self.reservation.in_words} reserved ({self.reservation.origin})"
        quantity, number, origin = self.batch_size
        batch = f"{number} {quantity} ({origin})"
        return f"Planned with: {batch}, {memory}, {reserved}; {self.bandwidths.in_words(self.names)}"

    @property
    def origins(self) -> list[tuple[str, str, str]]:
        """The same for reports: a quantity, its value, where it came from."""
        rows = [
            self.batch_size,
            ("memory per rank", self._memory_in_words, self.memory_origin),
            ("layers without tables", format_bytes(self.dense_bytes), "with gradients and optimizer state"),
            ("reserved for all but tables", self.reservation.in_words, self.reservation.origin),
        ]
        bandwidths = [(name, getattr(self.bandwidths, name)) for name in self.names]
        return rows + [
            (name, format_bandwidth(bandwidth.bytes_per_second), bandwidth.origin) for name, bandwidth in bandwidths
        ]

    @property
    def _memory_in_words(self) -> str:
        smallest, largest = min(self.memory.device_bytes), max(self.memory.device_bytes)
        return format_bytes(smallest) + ("" if smallest == largest else f" to {format_bytes(largest)}")


def find_facts(inputs: SetUpInputs, decisions: Decisions) -> ClusterFacts:
    """Collective. Return the same facts on every rank; bandwidths are measured if that was asked for.

    Environment variables are read on rank 0. Raises ConfigError, on all ranks: a variable or memory_bytes_per_rank has
    an impossible value. PlanError: the reservation leaves no memory for tables.
    """
    settings, consensus, device, layout = inputs.settings, inputs.consensus, inputs.device, inputs.layout
    groups, in_group = inputs.groups, consensus.all_or_none("setup", lambda: inputs.group_layout)
    local_ranks = layout.ranks_by_node[layout.node_of_rank[consensus.rank]]

    def look() -> tuple[tuple[BandwidthRequest, Reservation] | None, int, int]:
        planning, choices = settings.planning, None
        if consensus.rank == 0:
            choices = bandwidth_request(planning.bandwidths, os.environ), reservation_of(planning.reserve, os.environ)
        device_bytes = memory_bytes_per_rank(device, local_ranks, settings.memory_bytes_per_rank)
        return choices, device_bytes, host_bytes_per_rank(device, local_ranks)

    # What may raise on one rank alone comes first: the others would wait for it in the exchange.
    local_facts = consensus.all_or_none("setup", look)
    gathered = consensus.all_gather((*local_facts, device))
    request, reservation = gathered[0][0]
    # Replicas of a shard lie on several ranks, of which the smallest must hold it.
    memory = RankMemory(
        device_bytes=tuple(min(gathered[r][1] for r in groups.same_shards(rank)) for rank in range(groups.size)),
        host_bytes=tuple(min(gathered[r][2] for r in groups.same_shards(rank)) for rank in range(groups.size)),
    )
    shares = layout.num_ranks if inputs.shards_dense else 1
    dense = dense_bytes(inputs.module, decisions.tables, decisions.optimizers, str(inputs.trainer.precision), shares)
    reservation = reservation.with_dense(dense, min(memory.device_bytes))
    usable = memory.less(reservation)
    measured = measured_bandwidths(request.to_measure, layout, device, consensus)
    bandwidths = request.with_measured(measured)
    return ClusterFacts(
        layout=in_group,
        topology=make_topology(device, in_group, usable, bandwidths),
        devices=tuple(gathered[rank][3] for rank in groups.members),
        memory=memory,
        memory_origin="found" if settings.memory_bytes_per_rank is None else "memory_bytes_per_rank",
        reservation=reservation,
        bandwidths=bandwidths,
        names=names_of_bandwidths(in_group, device),
        batch_size=settings.batch_size_in_words,
        dense_bytes=dense,
    )


def names_of_bandwidths(layout: NodeLayout, device: torch.device) -> tuple[str, ...]:
    """Return the bandwidths by which plans for these ranks differ; torchrec's others have no effect."""
    names = ["host_memory"] if device.type == "cpu" else ["device_memory", "host_to_device"]
    names += ["intra_node"] if layout.ranks_on_node > 1 and layout.alike else []
    names += ["cross_node"] if layout.num_nodes > 1 else []
    return tuple(names)
