"""Ranks that are not there: how many, with what memory and bandwidths; what plans for them go by."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from lightning_distrec.advice.dry_module import DryModule, default_type
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.sharding.plan_report.facts import PlanFacts
from lightning_distrec.sharding.planning.bandwidths import Bandwidth, asked_bandwidths
from lightning_distrec.sharding.planning.plan import TableConstraints
from lightning_distrec.sharding.planning.planner import MadePlan
from lightning_distrec.sharding.planning.reservation import chosen_reservation, is_measured
from lightning_distrec.sharding.planning.topology import NodeLayout, RankMemory, make_topology
from lightning_distrec.sharding.sharding_types import HOST_KERNELS
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts, names_of_bandwidths
from lightning_distrec.strategies.tables.decisions import (
    Decisions,
    demands_of,
)
from lightning_distrec.strategies.tables.reserved_memory import weigh


@dataclass(frozen=True, kw_only=True)
class DryJob:
    """The ranks that a module is to train on, as they were described."""

    num_nodes: int
    ranks_on_node: int
    device: torch.device
    memory_bytes: int
    """Of one rank."""
    memory_origin: str
    """Who says so."""
    host_bytes: int = 0
    """Of a node, for tables that GPUs read from there."""
    bandwidths: Mapping[str, Bandwidth] = field(default_factory=dict)
    """Those that stand above what the strategy was told."""
    cuts_dense: bool = False

    @property
    def places(self) -> NodeLayout:
        """The ranks on their nodes."""
        return NodeLayout.of_nodes(*[self.ranks_on_node] * self.num_nodes)


def decisions_of(dry: DryModule, job: DryJob) -> Decisions:
    """Return what is decided about the tables on these ranks."""
    demands = demands_of(dry.wanted, dry.updates, job.device, job.places)
    if not job.host_bytes:  # what cannot be chosen need not be estimated, which takes most of the time
        demands = {name: _on_device(demand) for name, demand in demands.items()}
    return Decisions(dry.wanted.tables, [], dry.updates, demands, [], [])


def _on_device(demand: TableConstraints) -> TableConstraints:
    kernels = tuple(kernel for kernel in demand.compute_kernels if kernel not in HOST_KERNELS)
    return replace(demand, compute_kernels=kernels or demand.compute_kernels)


def facts_of(dry: DryModule, job: DryJob) -> ClusterFacts:
    """Return what the planner is told of the ranks. Raises PlanError: the reserve leaves nothing for tables."""
    planning, places = dry.settings.planning, job.places
    weighed = None
    if is_measured(planning.reserve):
        with tables_on_meta(), default_type(dry.trainer.precision):
            weighed = weigh(dry.trainer, dry.unconfigured, dry.settings, job.device, places, job.cuts_dense)
    reservation = weighed or chosen_reservation(planning.reserve, os.environ)
    bandwidths = asked_bandwidths(planning.bandwidths, os.environ).with_measured({})
    bandwidths = replace(bandwidths, **job.bandwidths)
    on_host = job.host_bytes // job.ranks_on_node if job.device.type == "cuda" else 0
    memory = RankMemory(device_bytes=(job.memory_bytes,) * places.num_ranks, host_bytes=(on_host,) * places.num_ranks)
    return ClusterFacts(
        places=places,
        topology=make_topology(job.device, places, memory.less(reservation), bandwidths),
        devices=(job.device,) * places.num_ranks,
        memory=memory,
        memory_origin=job.memory_origin,
        reservation=reservation,
        bandwidths=bandwidths,
        names=names_of_bandwidths(places, job.device),
    )


def holds(made: MadePlan) -> bool:
    """Return whether every rank has the memory that the plan needs."""
    cost = made.cost
    return bool(
        (cost.device_bytes <= cost.device_bytes_usable).all() and (cost.host_bytes <= cost.host_bytes_usable).all()
    )


def too_full(facts: PlanFacts, followed: tuple[str, str] | None) -> str:
    """Return which rank a plan gives too much. followed: the plan's file, and what it is called; None for none."""
    rank = facts.memory.worst
    what = "the plan" if followed is None else followed[1]
    if facts.memory.fits and facts.host_memory is not None:
        rank = facts.host_memory.worst
        held, usable = facts.host_memory.tables[rank], facts.host_memory.usable[rank]
    else:
        held, usable = facts.memory.tables[rank], facts.memory.usable[rank]
    return (
        f"{what} gives rank {rank} {int(held):,} bytes for tables and their exchange at "
        f"batch_size_per_rank={facts.batch_size}, and it has {int(usable):,} for that."
    )
