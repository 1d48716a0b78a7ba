"""Ranks, nodes and memory as torchrec's planner takes them, and how much memory is reserved for
what is not tables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import BasicCommsBandwidths

from lightning_distrec._compat.torchrec_modules import silence_torchrec
from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.host_memory import host_memory_bytes
from lightning_distrec.sharding.planning.bandwidths import AssumedBandwidths
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.units import format_bytes, parse_bytes

VARIABLE = "STORAGE_RESERVE_PERCENT"
PERCENT = re.compile(r"\s*([-+]?\d+(?:\.\d*)?)\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """How much of each rank's memory is reserved for what is not tables: a share of it, or
    bytes."""

    share: float = 0.0
    fixed_bytes: int = 0
    origin: str

    def bytes_of(self, memory_bytes: int) -> int:
        """Return the bytes reserved of a rank's memory: never more than all of it."""
        return min(
            memory_bytes, memory_bytes - int(memory_bytes * (1 - self.share)) + self.fixed_bytes
        )

    def with_dense(self, dense_bytes: int, memory_bytes: int) -> "Reservation":
        """Return the bytes of layers without tables in place of the default, if they need more."""
        # Only the default gives way: what the user set stays, even where layers without tables need
        # more.
        if self != DEFAULT or dense_bytes <= self.bytes_of(memory_bytes):
            return self
        return Reservation(
            fixed_bytes=dense_bytes, origin="what layers without tables need, more than 15%"
        )

    def of_host(self) -> "Reservation":
        """Return the reservation of the host's memory, for ranks that have a GPU."""
        # Bytes that are reserved of a GPU say nothing about its host, of whose memory the default
        # share is reserved then.
        return Reservation(
            share=DEFAULT.share if self.fixed_bytes else self.share, origin=self.origin
        )

    @property
    def in_words(self) -> str:
        """15%, 4.0 GiB."""
        return format_bytes(self.fixed_bytes) if self.fixed_bytes else f"{100 * self.share:g}%"


DEFAULT = Reservation(share=0.15, origin="default")


def reservation_of(option: str | float | None, environment: Mapping[str, str]) -> Reservation:
    """Return what the argument says ("15%", "4GB"), or STORAGE_RESERVE_PERCENT, or the default."""
    if option is not None:
        return _parse_reserve(option)
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT
    try:
        number = float(text)
    except ValueError:
        # All comparisons with nan are false, so that the check below refuses it.
        number = float("nan")
    if not 0 <= number < 100 or number == 1:
        raise ConfigError(
            f"the environment's {VARIABLE}={text!r}: the share of each rank's memory that is not "
            "for tables is needed, from 0 to below 1, as TorchEasyRec has it; or a percentage "
            "above 1 and below 100."
        )
    if number < 1:
        return Reservation(share=number, origin=f"environment {VARIABLE}={text}, a share")
    return Reservation(share=number / 100, origin=f"environment {VARIABLE}")


def _parse_reserve(value: str | float) -> Reservation:
    option = f"planning.reserve={value!r}"
    hint = "Write a percentage such as '15%', or a size such as '4GB'."
    # A number without a unit may mean bytes, GB or percent.
    if not isinstance(value, str) or re.fullmatch(r"[\s\d.]*", value):
        raise ConfigError(f"{option} has no unit. {hint}")
    match = PERCENT.fullmatch(value)
    if match:
        percent = float(match[1])
        if not 0 < percent < 100:
            raise ConfigError(
                f"{option}: a percentage above 0 and below 100 is needed, or nothing is left. "
                f"{hint}"
            )
        return Reservation(share=percent / 100, origin="argument")
    if value.strip().isalpha():
        raise ConfigError(f"{option} is no size. {hint}")
    return Reservation(fixed_bytes=parse_bytes(value, option), origin="argument")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What the ranks have, rank by rank, in bytes."""

    device_bytes: tuple[int, ...]
    """Where tables lie: a GPU's memory, or a rank's share of its host's."""
    host_bytes: tuple[int, ...]
    """A rank's share of its host's memory, in addition to its GPU's; 0 on CPU."""

    def less(self, reservation: Reservation) -> "RankMemory":
        """Return what is left of it for tables. Raises PlanError: nothing is left on a rank."""
        usable = [memory - reservation.bytes_of(memory) for memory in self.device_bytes]
        rank = int(np.argmin(usable))
        if usable[rank] <= 0:
            raise PlanError(
                f"{reservation.in_words} ({reservation.origin}) are reserved for what is not "
                f"tables, and rank {rank} has {format_bytes(self.device_bytes[rank])}: nothing is "
                "left for tables. Reserve less by planning.reserve, or use ranks with more memory."
            )
        host_reservation = reservation.of_host()
        usable_of_host = tuple(
            memory - host_reservation.bytes_of(memory) for memory in self.host_bytes
        )
        return RankMemory(device_bytes=tuple(usable), host_bytes=usable_of_host)


def memory_bytes_per_rank(device: torch.device, ranks_on_node: int, option: int | None) -> int:
    """Return all bytes of one rank: as the option says, its device's, or its share of the
    host's."""
    if option is not None:
        if option <= 0:
            raise ConfigError(f"memory_bytes_per_rank={option}: must be above 0.")
        return option
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes() // ranks_on_node


def host_bytes_per_rank(device: torch.device, ranks_on_node: int) -> int:
    """Return the bytes of a rank's share of its host's memory, where it has a GPU; 0 on CPU."""
    return host_memory_bytes() // ranks_on_node if device.type == "cuda" else 0


def make_topology(
    device: torch.device, layout: NodeLayout, memory: RankMemory, bandwidths: AssumedBandwidths
) -> Topology:
    """Return torchrec's description of the ranks.

    memory: what each rank has for tables and their exchange, without what is reserved for all else.
    It may be unequal; row-wise shards stay equal, because lookups find a row's rank by dividing.
    Where nodes are not alike each rank is described as a node of its own.
    """
    on_gpu = device.type == "cuda"
    with silence_torchrec():
        topology = Topology(
            world_size=layout.num_ranks,
            # torchrec has one number of ranks for all nodes. Where it differs each rank counts as a
            # node of its own, so that everything is assumed to be sent at the speed between nodes.
            local_world_size=layout.ranks_on_node if layout.alike else 1,
            compute_device=device.type,
            hbm_mem_bw=bandwidths.device_memory.bytes_per_millisecond,
            ddr_mem_bw=bandwidths.host_memory.bytes_per_millisecond,
            hbm_to_ddr_mem_bw=bandwidths.host_to_device.bytes_per_millisecond,
            generalized_comms_bandwidths=BasicCommsBandwidths(
                intra_host_bw=bandwidths.intra_node.bytes_per_millisecond,
                inter_host_bw=bandwidths.cross_node.bytes_per_millisecond,
            ),
        )
    # CustomTopologyData would be torchrec's word for unequal memory, but with it row-wise shards
    # follow the memory.
    for rank, described in enumerate(topology.devices):
        described.storage.hbm = memory.device_bytes[rank] if on_gpu else 0
        described.storage.ddr = memory.host_bytes[rank] if on_gpu else memory.device_bytes[rank]
    return topology
