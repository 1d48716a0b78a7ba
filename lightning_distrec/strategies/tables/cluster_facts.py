"""What planning goes by besides tables: ranks, their memory, what is kept of it, and how fast bytes move."""

import os
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torchrec.distributed.planner import Topology

from lightning_distrec.sharding.planning.bandwidths import Asked, ChosenBandwidths, asked_bandwidths
from lightning_distrec.sharding.planning.measured_bandwidths import measured_bandwidths
from lightning_distrec.sharding.planning.reservation import Reservation
from lightning_distrec.sharding.planning.topology import (
    NodeLayout,
    RankMemory,
    host_bytes_per_rank,
    make_topology,
    memory_bytes_per_rank,
)
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.tables.decisions import TableSettings
from lightning_distrec.strategies.tables.reserved_memory import reserve
from lightning_distrec.strategies.tables.table_run import TableRun
from lightning_distrec.units import format_bandwidth, format_bytes


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """What the planner is told."""

    places: NodeLayout
    topology: Topology
    """With the memory that is left for tables."""
    devices: tuple[torch.device, ...]
    """Of each rank, as that rank calls it."""
    memory: RankMemory
    """All of it."""
    memory_origin: str
    reservation: Reservation
    bandwidths: ChosenBandwidths
    names: tuple[str, ...]
    """The bandwidths that matter on these ranks."""

    @property
    def in_words(self) -> str:
        """One line for the start table: each value and who says so."""
        least, most = min(self.memory.device_bytes), max(self.memory.device_bytes)
        to = "" if least == most else f" to {format_bytes(most)}"
        memory = f"{format_bytes(least)}{to} a rank ({self.memory_origin})"
        kept = f"{self.reservation.in_words} kept ({self.reservation.origin})"
        return f"Planned with: {memory}, {kept}; {self.bandwidths.in_words(self.names)}"

    @property
    def origins(self) -> list[tuple[str, str, str]]:
        """The same for reports: what, its value, who says so."""
        least, most = min(self.memory.device_bytes), max(self.memory.device_bytes)
        to = "" if least == most else f" to {format_bytes(most)}"
        rows = [("memory of a rank", f"{format_bytes(least)}{to}", self.memory_origin)]
        rows.append(("kept for all but tables", self.reservation.in_words, self.reservation.origin))
        found = [(name, getattr(self.bandwidths, name)) for name in self.names]
        return rows + [(name, format_bandwidth(one.bytes_per_second), one.origin) for name, one in found]


def find_facts(run: TableRun, tables: list[Table]) -> ClusterFacts:
    """Collective. Return what the planner is told, on every rank; bandwidths are measured if that was asked for.

    What the environment says is what rank 0's says. Raises ConfigError, on all ranks: a variable or
    memory_bytes_per_rank is not what it must be. PlanError: what is kept leaves no memory for tables.
    """
    settings, consensus, device, places = run.settings, run.consensus, run.device, run.places
    asked, mine = consensus.all_or_none("setup", lambda: _look(settings, device, places, consensus.rank))
    reservation = reserve(run, tables)
    told = consensus.all_gather((asked, mine, device))
    asked = told[0][0]
    assert asked is not None
    for variable in asked.bare:
        rank_zero_info(f"{variable}={os.environ.get(variable)} has no unit: bytes per second are meant.")
    memory = RankMemory(
        device_bytes=tuple(device_bytes for _, (device_bytes, _), _ in told),
        host_bytes=tuple(host_bytes for _, (_, host_bytes), _ in told),
    )
    usable = memory.less(reservation)
    measured = measured_bandwidths(asked.wanted, places, device, consensus, asked.afresh)
    bandwidths = asked.with_measured(measured)
    return ClusterFacts(
        places=places,
        topology=make_topology(device, places, usable, bandwidths),
        devices=tuple(of_rank for _, _, of_rank in told),
        memory=memory,
        memory_origin="found" if settings.memory_bytes_per_rank is None else "memory_bytes_per_rank",
        reservation=reservation,
        bandwidths=bandwidths,
        names=names_of_bandwidths(places, device),
    )


def _look(
    settings: TableSettings, device: torch.device, places: NodeLayout, rank: int
) -> tuple[Asked | None, tuple[int, int]]:
    """Return what rank 0 has to say of bandwidths, and what memory this rank has, on its device and on its host."""
    here = places.ranks_by_node[places.node_of_rank[rank]]
    mine = memory_bytes_per_rank(device, here, settings.memory_bytes_per_rank), host_bytes_per_rank(device, here)
    return None if rank else asked_bandwidths(settings.planning.bandwidths, os.environ), mine


def names_of_bandwidths(places: NodeLayout, device: torch.device) -> tuple[str, ...]:
    """Return the bandwidths by which plans for these ranks differ; torchrec's rest is of no effect."""
    names = ["host_memory"] if device.type == "cpu" else ["device_memory", "host_to_device"]
    names += ["intra_node"] if places.ranks_on_node > 1 and places.alike else []
    names += ["cross_node"] if places.num_nodes > 1 else []
    return tuple(names)
