"""Ranks, nodes and memory, as torchrec's planner wants to know them."""

from pathlib import Path

import torch
from torchrec.distributed.planner import Topology

from lightning_distrec._compat import torchrec_quiet
from lightning_distrec.errors import ConfigError

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
RESERVED_SHARE = 0.15
"""Share of each rank's memory that is kept for what is not tables: dense layers, activations, exchanged batches."""


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less. Source: /proc/meminfo, cgroup."""
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    for path in CGROUP_LIMITS:
        if path.exists() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total


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
