"""Ranks, nodes and memory, as torchrec's planner wants to know them."""

from dataclasses import dataclass

import torch
from torchrec.distributed.planner import Topology

from lightning_distrec._compat import torchrec_quiet
from lightning_distrec.errors import ConfigError
from lightning_distrec.machine import host_memory_bytes

RESERVED_SHARE = 0.15
"""Share of each rank's memory that is kept for what is not tables: dense layers, activations, exchanged batches."""


@dataclass(frozen=True)
class Places:
    """How many ranks there are to place tables on."""

    num_ranks: int
    ranks_on_node: int
    """How many the node has that has most of them."""
    alike: bool = True
    """Whether all nodes have as many."""

    @property
    def num_nodes(self) -> int:
        """Nodes, each with as many ranks; one, where they have unequal numbers, which torchrec knows no word for."""
        return max(1, self.num_ranks // self.ranks_on_node) if self.alike else 1


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


def make_topology(device: torch.device, num_ranks: int, ranks_on_node: int, memory_bytes: int) -> Topology:
    """Return torchrec's description of `num_ranks` equal ranks, `ranks_on_node` of them on each node.

    memory_bytes: what one rank has, before the reserved share is taken off.
    """
    host_bytes = host_memory_bytes() // ranks_on_node
    on_device = {"hbm_cap": memory_bytes, "ddr_cap": host_bytes} if device.type == "cuda" else {"ddr_cap": memory_bytes}
    with torchrec_quiet():
        return Topology(
            world_size=num_ranks,
            local_world_size=ranks_on_node if num_ranks % ranks_on_node == 0 else num_ranks,
            compute_device=device.type,
            **on_device,
        )
