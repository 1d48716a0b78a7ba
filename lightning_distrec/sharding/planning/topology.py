"""Ranks, nodes and memory, as torchrec's planner wants to know them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import BasicCommsBandwidths

from lightning_distrec._compat.torchrec import silence_torchrec
from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.host_memory import host_memory_bytes
from lightning_distrec.sharding.planning.bandwidths import ChosenBandwidths
from lightning_distrec.sharding.planning.gloo_bandwidths import GlooBandwidths
from lightning_distrec.sharding.planning.reservation import Reservation


@dataclass(frozen=True)
class NodeLayout:
    """The ranks that there are to place tables on, and which of them share a node."""

    node_of_rank: tuple[int, ...]
    """Rank -> its node, numbered by first appearance."""

    @classmethod
    def of_nodes(cls, *ranks_by_node: int) -> "NodeLayout":
        """Return nodes with so many ranks each, one node's ranks after the other's."""
        return cls(tuple(node for node, number in enumerate(ranks_by_node) for _ in range(number)))

    @classmethod
    def equal(cls, num_ranks: int, ranks_on_node: int) -> "NodeLayout":
        """Return so many ranks on nodes that have as many each; the last may have fewer."""
        return cls(tuple(rank // ranks_on_node for rank in range(num_ranks)))

    @classmethod
    def gathered(cls, told: Sequence[tuple[int, int]]) -> "NodeLayout":
        """Return what all ranks have told: the number of their node, and how many ranks are on it.

        Where a launcher gives all ranks one node's number, how many are on each still tells them apart.
        """
        numbers = list(dict.fromkeys(node for node, _ in told))
        by_number = cls(tuple(numbers.index(node) for node, _ in told))
        if all(
            by_number.ranks_by_node[node] == here for node, (_, here) in zip(by_number.node_of_rank, told, strict=True)
        ):
            return by_number
        in_blocks: list[int] = []
        while len(in_blocks) < len(told):
            here = max(1, min(told[len(in_blocks)][1], len(told) - len(in_blocks)))
            in_blocks += [in_blocks[-1] + 1 if in_blocks else 0] * here
        return cls(tuple(in_blocks))

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.node_of_rank)

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """How many ranks each node has."""
        counts = Counter(self.node_of_rank)
        return tuple(counts[node] for node in range(len(counts)))

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(set(self.node_of_rank))

    @property
    def ranks_on_node(self) -> int:
        """How many ranks the node has that has most of them."""
        return max(self.ranks_by_node)

    @property
    def alike(self) -> bool:
        """Whether nodes are as torchrec takes them to be: all with as many ranks, that follow one another."""
        return self == NodeLayout.of_nodes(*self.ranks_by_node) and len(set(self.ranks_by_node)) == 1

    def neighbours(self, rank: int) -> list[int]:
        """Return the other ranks on a rank's node."""
        return [r for r, node in enumerate(self.node_of_rank) if node == self.node_of_rank[rank] and r != rank]

    def strangers(self, rank: int) -> list[int]:
        """Return the ranks on other nodes than a rank's."""
        return [r for r, node in enumerate(self.node_of_rank) if node != self.node_of_rank[rank]]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What the ranks have, rank by rank, in bytes."""

    device_bytes: tuple[int, ...]
    """Where tables lie: a GPU's memory, or a rank's share of its host's."""
    host_bytes: tuple[int, ...]
    """A rank's share of its host's memory beside its GPU; 0 on CPU."""

    def less(self, reservation: Reservation) -> "RankMemory":
        """Return what is left of it for tables. Raises PlanError: nothing is left on a rank."""
        left = [memory - reservation.bytes_of(memory) for memory in self.device_bytes]
        least = min(range(len(left)), key=left.__getitem__)
        if left[least] <= 0:
            raise PlanError(
                f"{reservation.in_words} ({reservation.origin}) are kept for what is not tables, and rank {least} has "
                f"{self.device_bytes[least]:,} bytes: nothing is left for tables. Say less by planning.reserve, or use "
                "ranks with more memory."
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
    """Return the bytes of a rank's share of its host's memory beside its GPU; 0 on CPU, where that is its memory."""
    return host_memory_bytes() // ranks_on_node if device.type == "cuda" else 0


def make_topology(
    device: torch.device, places: NodeLayout, memory: RankMemory, bandwidths: ChosenBandwidths
) -> Topology:
    """Return torchrec's description of the ranks.

    memory: what each rank has for tables and their exchange, without what is reserved for all else. It may be unequal;
    row-wise cuts stay equal, because lookups find a row's rank by dividing.
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
