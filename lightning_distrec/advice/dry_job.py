"""The job of a dry run: how many ranks, with which memory and bandwidths; and what tables take of a rank in it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lightning_distrec.advice.dry_module import DryModule, dry_module
from lightning_distrec.sharding.planning.bandwidths import Bandwidth, bandwidth_request
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.id_counts import MIN_FACTOR
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.topology import RankMemory, make_topology, reservation_of
from lightning_distrec.sharding.planning.traffic import IDS, ROW_GRADIENTS, ROWS
from lightning_distrec.sharding.sharders import HOST_KERNELS
from lightning_distrec.sharding.sharding_groups import NodeLayout, ShardingGroupOptions, checked_size
from lightning_distrec.strategies.estimates.estimate import TablesShare
from lightning_distrec.strategies.estimates.module_sizes import Job, dense_bytes
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts, names_of_bandwidths
from lightning_distrec.strategies.tables.decisions import Decisions, constraints_of
from lightning_distrec.strategies.tables.plan_of_run import new_plan
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings
from lightning_distrec.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class DryJob:
    """The ranks that a module is to train on."""

    num_nodes: int
    ranks_on_node: int
    device: torch.device
    memory_bytes: int
    """Memory of one rank."""
    memory_origin: str
    """Where the value came from."""
    host_bytes: int = 0
    """Host memory of a node, for tables that GPUs read from there."""
    bandwidths: Mapping[str, Bandwidth] = field(default_factory=dict)
    """Override those of the strategy."""
    shards_dense: bool = False
    """Whether layers without tables are sharded too."""

    groups: ShardingGroupOptions = field(default_factory=ShardingGroupOptions)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.num_nodes * self.ranks_on_node

    @property
    def layout(self) -> NodeLayout:
        """Which of the ranks that shard the tables among them share a node. Raises ConfigError: see sharding_groups."""
        all_ranks = NodeLayout.from_node_sizes(*[self.ranks_on_node] * self.num_nodes)
        return all_ranks.group_layout(checked_size(self.groups, self.num_ranks))


def make_decisions(dry: DryModule, job: DryJob) -> Decisions:
    """Return what is decided about the tables on these ranks."""
    constraints = constraints_of(dry.selection, dry.updates, job.device, job.layout)
    if dry.counts is not None:
        constraints = dry.counts.add_to(constraints, dry.selection.tables)
    if not job.host_bytes:  # estimates take most of the time, and are not needed for kernels that cannot be chosen
        constraints = {name: _on_device(table_constraints) for name, table_constraints in constraints.items()}
    return Decisions(selection=dry.selection, updates=dry.updates, constraints=constraints, optimizers=dry.optimizers)


def _on_device(constraints: TableConstraints) -> TableConstraints:
    # Where the user has allowed kernels of the host alone, these stay.
    kernels = tuple(kernel for kernel in constraints.compute_kernels if kernel not in HOST_KERNELS)
    return replace(constraints, compute_kernels=kernels or constraints.compute_kernels)


def make_facts(dry: DryModule, job: DryJob) -> ClusterFacts:
    """Return what planning needs to know of the ranks. Raises PlanError: the reservation leaves nothing for tables."""
    planning, layout = dry.settings.planning, job.layout
    reservation = reservation_of(planning.reserve, os.environ)
    # All ranks, also where sharding_groups divide the tables among fewer.
    shares = job.num_ranks if job.shards_dense else 1
    dense = dense_bytes(dry.module, dry.selection.tables, dry.optimizers, dry.trainer.precision, shares)
    reservation = reservation.with_dense(dense, job.memory_bytes)
    # Nothing can be measured without ranks: torchrec's defaults fill in, and the report mentions it.
    bandwidths = bandwidth_request(planning.bandwidths, os.environ).with_measured({})
    bandwidths = replace(bandwidths, **job.bandwidths)
    # On a CPU a rank's memory is the host's already, and would count twice.
    on_host = job.host_bytes // job.ranks_on_node if job.device.type == "cuda" else 0
    memory = RankMemory(device_bytes=(job.memory_bytes,) * layout.num_ranks, host_bytes=(on_host,) * layout.num_ranks)
    return ClusterFacts(
        layout=layout,
        topology=make_topology(job.device, layout, memory.less(reservation), bandwidths),
        devices=(job.device,) * layout.num_ranks,
        memory=memory,
        memory_origin=job.memory_origin,
        reservation=reservation,
        bandwidths=bandwidths,
        names=names_of_bandwidths(layout, job.device),
        batch_size=dry.settings.batch_size_in_words,
        dense_bytes=dense,
    )


def describe_misfit(plan: ShardingPlan, plan_name: str) -> str:
    """Return which rank lacks memory for a plan; "" where none does. plan_name: what messages call it."""
    if plan.fits:
        return ""
    # One lack at a time, and the device's first.
    memory = plan.memory if plan.host_memory is None or not plan.memory.fits else plan.host_memory
    rank = memory.worst
    return (
        f"{plan_name} gives rank {rank} {format_bytes(memory.tables[rank])} of tables and their exchange at "
        f"batch_size_per_rank={plan.batch_size}, and it has {format_bytes(memory.usable[rank])} for them."
    )


def planned_share(
    module: LightningModule, job: Job, trainer: Any, device_type: str, settings: TableSettings, profile: StepProfile
) -> TablesShare:
    """Return what the fullest rank holds and what the busiest sends. Raises DistRecError: there is no plan.

    Arguments as `advise`. Ids per example are those of the profile, where they were counted.
    """
    device = torch.device(device_type)
    settings = replace(settings, batch_size_per_rank=profile.batch_size or settings.batch_size_per_rank)
    dry_job = DryJob(
        num_nodes=job.num_nodes,
        ranks_on_node=job.num_ranks // job.num_nodes,
        device=device,
        memory_bytes=job.memory_bytes,
        memory_origin="advise",
    )
    # With the job's precision, which has Lightning's full name; the YAML may have a short one.
    like_trainer = SimpleNamespace(
        callbacks=trainer.callbacks,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        precision=job.precision,
    )
    dry = dry_module(module, like_trainer, settings, device)
    decisions = make_decisions(dry, dry_job)
    counted = {name: _counted(dry, name, constraints, profile) for name, constraints in decisions.constraints.items()}
    return _share(new_plan(replace(decisions, constraints=counted), settings, make_facts(dry, dry_job)))


def _counted(dry: DryModule, name: str, constraints: TableConstraints, profile: StepProfile) -> TableConstraints:
    table = next(table for table in dry.selection.tables if table.full_name == name)
    lookups, examples = profile.lookups.get(table.collection), profile.batch_size
    if lookups is None or not examples:
        return constraints
    # A collection's profile counts what is sent for ids: one length per example too, which is no id.
    lengths = 0 if table.plain is not None else examples
    features = table.config.feature_names
    factors = tuple(max(MIN_FACTOR, (lookups[feature] - lengths) / examples) for feature in features)
    return replace(constraints, pooling_factors=factors)


def _share(plan: ShardingPlan) -> TablesShare:
    # They may be two ranks. Memory is limited by the first, a step's time by the second.
    fullest, busiest = int(plan.memory.tables.argmax()), int(plan.traffic.sent().argmax())
    gradients = 0
    for table in plan.tables.values():
        if table.update == "dense":
            on_fullest = np.asarray(table.ranks) == fullest
            gradients += int((table.shard_rows * table.shard_columns)[on_fullest].sum()) * table.element_bytes
    # With updates, table_bytes has gradients too, where a step keeps them as large as the table.
    rows, held = (int(plan.table_bytes(updates=updates)[fullest]) for updates in (False, True))
    return TablesShare(
        memory={
            "parameters": float(rows),
            "gradients": float(gradients),
            "optimizer state": float(max(0, held - rows - gradients)),
            "exchange": float(plan.memory.tables[fullest] - held),
        },
        sent={kind: float(plan.traffic.sent(kind)[busiest]) for kind in (IDS, ROWS, ROW_GRADIENTS)},
    )
