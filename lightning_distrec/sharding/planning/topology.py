"""Ranks, nodes and memory, as torchrec's planner wants to know them."""

from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import BasicCommsBandwidths, CollectiveType
from typing_extensions import override

from lightning_distrec._compat.torchrec import silence_torchrec
from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.host_memory import host_memory_bytes
from lightning_distrec.sharding.node_layout import NodeLayout
from lightning_distrec.sharding.planning.bandwidths import ChosenBandwidths
from lightning_distrec.sharding.planning.reservation import Reservation
from lightning_distrec.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What the ranks have, rank by rank, in bytes."""

    device_bytes: tuple[int, ...]
    """Where tables lie: a GPU's memory, or a rank's share of its host's."""
    host_bytes: tuple[int, ...]
    """A rank's share of its host's memory, in addition to its GPU's; 0 on CPU."""

    def less(self, reservation: Reservation) -> "RankMemory":
        """Return what is left of it for tables. Raises PlanError: nothing is left on a rank."""
        left = [memory - reservation.bytes_of(memory) for memory in self.device_bytes]
        rank = min(range(len(left)), key=left.__getitem__)
        if left[rank] <= 0:
            raise PlanError(
                f"{reservation.in_words} ({reservation.origin}) are kept for what is not tables, and rank {rank} has "
                f"{format_bytes(self.device_bytes[rank])}: nothing is left for tables. Reserve less "
                "by planning.reserve, or use ranks with more memory."
            )
        host = reservation.of_host()
        of_host = tuple(memory - host.bytes_of(memory) for memory in self.host_bytes)
        return RankMemory(device_bytes=tuple(left), host_bytes=of_host)


def memory_bytes_per_rank(device: torch.device, ranks_on_node: int, given: int | None) -> int:
    """Return the bytes one rank has for its tables and all else: `given`, or the device's, or its share of the host's.

    Raises ConfigError: `given` is not above 0.
    """
    if given is not None:
        if given <= 0:
            raise ConfigError(f"memory_bytes_per_rank={given}: must be above 0.")
        return given
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes() // ranks_on_node


def host_bytes_per_rank(device: torch.device, ranks_on_node: int) -> int:
    """Return the bytes of a rank's share of its host's memory, where it has a GPU; 0 on CPU."""
    return host_memory_bytes() // ranks_on_node if device.type == "cuda" else 0


def make_topology(
    device: torch.device, places: NodeLayout, memory: RankMemory, bandwidths: ChosenBandwidths
) -> Topology:
    """Return torchrec's description of the ranks.

    memory: what each rank has for tables and their exchange, without what is reserved for all else. It may be unequal;
    row-wise shards stay equal, because lookups find a row's rank by dividing.
    Where nodes are not alike, for which torchrec has no word, each rank is described as a node of its own: everything
    then travels at the speed between nodes.
    """
    on_gpu = device.type == "cuda"
    collectives = BasicCommsBandwidths if on_gpu else GlooBandwidths
    with silence_torchrec():
        topology = Topology(
            world_size=places.num_ranks,
            local_world_size=places.ranks_on_node if places.alike else 1,
            compute_device=device.type,
            hbm_mem_bw=bandwidths.device_memory.bytes_per_millisecond,
            ddr_mem_bw=bandwidths.host_memory.bytes_per_millisecond,
            hbm_to_ddr_mem_bw=bandwidths.host_to_device.bytes_per_millisecond,
            generalized_comms_bandwidths=collectives(
                intra_host_bw=bandwidths.intra_node.bytes_per_millisecond,
                inter_host_bw=bandwidths.cross_node.bytes_per_millisecond,
            ),
        )
    # CustomTopologyData would be torchrec's word for unequal memory, but with it row-wise shards follow the memory.
    for rank, described in enumerate(topology.devices):
        described.storage.hbm = memory.device_bytes[rank] if on_gpu else 0
        described.storage.ddr = memory.host_bytes[rank] if on_gpu else memory.device_bytes[rank]
    return topology


class GlooBandwidths(BasicCommsBandwidths):
    """Those of torchrec, but for two collectives.

    gloo scatters sums by summing everywhere (torch 2.13: twice the bytes on the wire, as all_reduce sends them). And
    torchrec takes the sums of data_parallel tables to travel between nodes even where there is one.
    """

    @override
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Return bytes per millisecond of a collective of `world_size` ranks, `local_world_size` of them on a node."""
        if collective_type == CollectiveType.ALL_REDUCE and world_size <= local_world_size:
            # torchrec asks for the time of the table's bytes; a ring sends nearly twice as many.
            return self.intra_host_bw / (2 * (world_size - 1) / world_size) if world_size > 1 else self.intra_host_bw
        bandwidth = float(super().get_bw(local_world_size, world_size, collective_type))
        return bandwidth / 2 if collective_type == CollectiveType.REDUCE_SCATTER else bandwidth
