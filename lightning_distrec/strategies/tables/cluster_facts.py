"""What planning needs to know besides tables: ranks, their memory and bandwidths; and what of the
memory is free."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.planner import Topology

from lightning_distrec import gpu
from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.host_memory import free_host_bytes, free_process_bytes, host_memory_bytes
from lightning_distrec.optimizers.translation import UNKNOWN_TENSORS, state_numbers
from lightning_distrec.sharding.planning.bandwidths import (
    AssumedBandwidths,
    BandwidthRequest,
    bandwidth_request,
    measured_bandwidths,
)
from lightning_distrec.sharding.planning.sharding_plan import Origin, ShardingPlan
from lightning_distrec.sharding.planning.topology import (
    RankMemory,
    Reservation,
    host_bytes_per_rank,
    make_topology,
    memory_bytes_per_rank,
    reservation_of,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table
from lightning_distrec.sharding.weights.shard_access import without_guards
from lightning_distrec.strategies.tables.set_up_inputs import Decisions, SetUpInputs
from lightning_distrec.units import format_bandwidth, format_bytes

TRUE_ITEMSIZE = {"16-true": 2, "bf16-true": 2, "64-true": 8}
"""Precision of a Trainer that changes types -> bytes of an element of any parameter."""


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
    batch_size: Origin
    """Examples per rank and step."""
    dense_bytes: int
    """Parameters, gradients and optimizer state of the layers without tables, on a rank."""

    @property
    def names(self) -> list[str]:
        """The bandwidths by which plans for these ranks differ."""
        on_cpu = self.devices[0].type == "cpu"
        names = ["host_memory"] if on_cpu else ["device_memory", "host_to_device"]
        if self.layout.ranks_on_node > 1 and self.layout.alike:
            names.append("intra_node")
        if self.layout.num_nodes > 1:
            names.append("cross_node")
        return names

    @property
    def in_words(self) -> str:
        """One line for the start table: each value and where it came from."""
        memory = f"{self._memory_in_words} per rank ({self.memory_origin})"
        reserved = f"{self.reservation.in_words} reserved ({self.reservation.origin})"
        quantity, number, origin = self.batch_size
        batch = f"{number} {quantity} ({origin})"
        return (
            f"Planned with: {batch}, {memory}, {reserved}; {self.bandwidths.in_words(self.names)}"
        )

    @property
    def origins(self) -> list[tuple[str, str, str]]:
        """The same for reports: a quantity, its value, where it came from."""
        rows = [
            self.batch_size,
            ("memory per rank", self._memory_in_words, self.memory_origin),
            (
                "layers without tables",
                format_bytes(self.dense_bytes),
                "with gradients and optimizer state",
            ),
            ("reserved for all but tables", self.reservation.in_words, self.reservation.origin),
        ]
        for name in self.names:
            bandwidth = getattr(self.bandwidths, name)
            rows.append((name, format_bandwidth(bandwidth.bytes_per_second), bandwidth.origin))
        return rows

    @property
    def _memory_in_words(self) -> str:
        smallest = min(self.memory.device_bytes)
        largest = max(self.memory.device_bytes)
        if smallest == largest:
            return format_bytes(smallest)
        return f"{format_bytes(smallest)} to {format_bytes(largest)}"


def find_facts(inputs: SetUpInputs, decisions: Decisions) -> ClusterFacts:
    """Collective. Return the same facts on every rank; bandwidths are measured if that was asked
    for.

    Environment variables are read on rank 0. Raises ConfigError, on all ranks: a variable or
    memory_bytes_per_rank has an impossible value. PlanError: the reservation leaves no memory for
    tables.
    """
    settings = inputs.settings
    consensus = inputs.consensus
    device = inputs.device
    layout = inputs.layout
    groups = inputs.groups
    in_group = consensus.all_or_none("setup", lambda: inputs.group_layout)
    local_ranks = layout.ranks_by_node[layout.node_of_rank[consensus.rank]]

    def look() -> tuple[tuple[BandwidthRequest, Reservation] | None, int, int]:
        planning = settings.planning
        choices = None
        if consensus.rank == 0:
            choices = (
                bandwidth_request(planning.bandwidths, os.environ),
                reservation_of(planning.reserve, os.environ),
            )
        device_bytes = memory_bytes_per_rank(device, local_ranks, settings.memory_bytes_per_rank)
        return choices, device_bytes, host_bytes_per_rank(device, local_ranks)

    # What may raise on one rank alone comes first: the others would wait for it in the exchange.
    local_facts = consensus.all_or_none("setup", look)
    gathered = consensus.all_gather((*local_facts, device))
    request, reservation = gathered[0][0]
    device_bytes = []
    host_bytes = []
    for rank in range(groups.size):
        # Replicas of a shard lie on several ranks, of which the smallest must hold it.
        replicas = [gathered[replica] for replica in groups.same_shards(rank)]
        device_bytes.append(min(facts[1] for facts in replicas))
        host_bytes.append(min(facts[2] for facts in replicas))
    memory = RankMemory(device_bytes=tuple(device_bytes), host_bytes=tuple(host_bytes))
    shares = layout.num_ranks if inputs.shards_dense else 1
    dense = dense_bytes(
        inputs.module, decisions.tables, decisions.optimizers, str(inputs.trainer.precision), shares
    )
    reservation = reservation.with_dense(dense, min(memory.device_bytes))
    usable = memory.less(reservation)
    measured = measured_bandwidths(request.to_measure, layout, device, consensus)
    bandwidths = request.with_measured(measured, device.type)
    return ClusterFacts(
        layout=in_group,
        topology=make_topology(device, in_group, usable, bandwidths),
        devices=tuple(gathered[rank][3] for rank in groups.members),
        memory=memory,
        memory_origin="found"
        if settings.memory_bytes_per_rank is None
        else "memory_bytes_per_rank",
        reservation=reservation,
        bandwidths=bandwidths,
        batch_size=settings.batch_size_in_words,
        dense_bytes=dense,
    )


NUM_LISTED = 10
"""How many tables the message lists."""
UNLIMITED = 2**62
LARGE_PART = 8
"""Part of a node's memory above which full tables of all of its ranks are a warning."""


@without_guards
def check_start_memory(inputs: SetUpInputs, tables: list[Table], plan: ShardingPlan) -> None:
    """Collective. Raise InfeasiblePlanError on every rank: a node, process or GPU lacks memory for
    its shards.

    The plan has seen how much memory there is; this is about what is free of it, beside tables that
    were built in full.
    """
    _warn_of_full_tables(tables, max(inputs.layout.ranks_by_node))
    ranks = inputs.consensus
    layout = inputs.layout
    on_gpu = inputs.device.type == "cuda"
    position = ranks.rank % inputs.groups.size
    device_share = int(plan.table_bytes()[position])
    host_share = int(plan.table_bytes(on_host=True)[position])
    if not on_gpu:
        device_share, host_share = 0, device_share + host_share
    if ranks.rank:  # these free their full tables before any shard is made
        device_share -= sum(t.parameter.nbytes for t in tables if t.parameter.is_cuda)
        host_share -= sum(t.parameter.nbytes for t in tables if t.parameter.device.type == "cpu")
    free_device = gpu.free_bytes(inputs.device) if on_gpu else UNLIMITED
    local = (host_share, device_share, free_host_bytes(), free_process_bytes(), free_device)
    needs = ranks.all_gather(local)
    lacks = []
    host_needs = [0] * layout.num_nodes
    free_on_host = [UNLIMITED] * layout.num_nodes
    for rank, (host, device, free_host, free_process, free) in enumerate(needs):
        lacks.append((f"rank {rank}'s process", host, free_process))
        lacks.append((f"rank {rank}'s GPU", device, free))
        node = layout.node_of_rank[rank]
        host_needs[node] += host
        free_on_host[node] = min(free_on_host[node], free_host)
    for node in range(layout.num_nodes):
        lacks.append((f"node {node}", host_needs[node], free_on_host[node]))
    for place, needed, free in lacks:
        if needed > free:
            raise InfeasiblePlanError(_message(place, needed, free, tables, plan))


def _warn_of_full_tables(tables: list[Table], ranks_on_node: int) -> None:
    full = sum(t.parameter.nbytes for t in tables if t.parameter.device.type == "cpu")
    node_bytes = host_memory_bytes()
    if ranks_on_node > 1 and full * ranks_on_node > node_bytes / LARGE_PART:
        rank_zero_warn(
            f"{ranks_on_node} ranks of a node have built {format_bytes(full)} of full tables each, "
            f"{format_bytes(full * ranks_on_node)} of its {format_bytes(node_bytes)}, before the "
            "strategy could share them out. Build tables in configure_model, under "
            "lightning_distrec.meta_tables() or under trainer.init_module(): each rank makes its "
            "own rows only."
        )


def _message(place: str, needed: int, free: int, tables: list[Table], plan: ShardingPlan) -> str:
    largest_first = sorted(tables, key=lambda table: -table.parameter.nbytes)
    lines = []
    for table in largest_first[:NUM_LISTED]:
        rows, columns = table.parameter.shape
        full = ""
        if not table.parameter.is_meta:
            full = f"{format_bytes(table.parameter.nbytes)} in full on every rank, "
        shards = format_bytes(float(plan.tables[table.full_name].shard_bytes(updates=True).max()))
        lines.append(
            f"\n  - table '{table.full_name}' ({rows:,} x {columns}): {full}{shards} in its "
            "largest shard"
        )
    if len(tables) > NUM_LISTED:
        lines.append(f"\n  - and {len(tables) - NUM_LISTED} more")
    way_out = "Use more ranks, so that each holds less."
    if not all(table.parameter.is_meta for table in tables):
        way_out = (
            "Build tables in configure_model or under meta_tables(): no rank holds a full one "
            "then. Or u" + way_out[1:]
        )
    return (
        f"{place} cannot hold its shards (rows, gradients, optimizer state): sharding takes "
        f"{format_bytes(needed)} more, and {format_bytes(free)} are "
        f"free.{''.join(lines)}\n{way_out}"
    )


def dense_bytes(
    module: nn.Module,
    tables: Iterable[Table],
    optimizers: Iterable[Optimizer],
    precision: str,
    shares: int,
) -> int:
    """Return bytes of parameters, gradients, optimizer state and buffers that are not of `tables`.

    shares: number of ranks that share them, 1 where they are replicated. An unknown optimizer
    counts as Adam.
    """
    table_ids = {id(table.parameter) for table in tables}
    dense = {id(p): p for p in module.parameters() if id(p) not in table_ids}
    itemsize = {key: TRUE_ITEMSIZE.get(precision, p.itemsize) for key, p in dense.items()}
    total = sum(
        p.numel() * itemsize[key] * (2 if p.requires_grad else 1) for key, p in dense.items()
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in dense and parameter.requires_grad:
                    numbers = state_numbers(optimizer, group, parameter)
                    numbers = UNKNOWN_TENSORS * parameter.numel() if numbers is None else numbers
                    total += numbers * itemsize[id(parameter)]
    return total // shares + sum(buffer.numel() * buffer.itemsize for buffer in module.buffers())
