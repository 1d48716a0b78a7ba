"""What a dry run starts from: a module on the meta device, its ranks, and what tables take of
them."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec.advice.meta_copy import configured_optimizers, meta_copy
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.torchrec_optimizers import see_through
from lightning_distrec.optimizers.translation import UNKNOWN_TENSORS, TableUpdate
from lightning_distrec.prefetch.loaders import first_batches, loaders_in, peek_obstacle
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.sharding.planning.bandwidths import Bandwidth, bandwidth_request
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.id_counts import IdCounts
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.topology import RankMemory, make_topology, reservation_of
from lightning_distrec.sharding.sharders import HOST_KERNELS
from lightning_distrec.sharding.sharding_groups import (
    NodeLayout,
    ShardingGroupOptions,
    checked_size,
)
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts, dense_bytes
from lightning_distrec.strategies.tables.decisions import (
    decide_constraints,
    decide_updates,
    select_tables,
)
from lightning_distrec.strategies.tables.replicas import why_kept
from lightning_distrec.strategies.tables.set_up_inputs import Decisions, TableSettings
from lightning_distrec.units import describe_error, format_bytes, shortened


@dataclass(frozen=True, kw_only=True)
class DryModule:
    """A module on the meta device, and the decisions about its tables that do not depend on
    ranks."""

    module: LightningModule
    """Configured, on the meta device."""
    decisions: Decisions
    """Those without ranks. Of configure_optimizers where it did not fail."""
    trainer: Any
    """Stands for a Trainer: has the attributes that decisions need."""
    settings: TableSettings
    assumed: list[str]
    """Assumptions, for the report."""
    counts: IdCounts | None = None
    """Ids in batches, where some were looked at."""


def dry_module(
    module: LightningModule, trainer: Any, settings: TableSettings, device: torch.device
) -> DryModule:
    """Inspect a module that was built on the meta device, without changing it.

    trainer: has callbacks, precision, accumulate_grad_batches and gradient_clip_val, as a Trainer
    would. Raises
    ConfigError: configure_model needs memory or a Trainer; there are no tables. And the strategy's
    own errors.
    """
    precision = trainer.precision
    try:
        # As Lightning calls configure_model, but with tables on meta. The random state stays, so
        # that a fit after this draws the same.
        with tables_on_meta(), default_type(precision), torch.random.fork_rng(devices=[]):
            copied = meta_copy(module)
    except Exception as error:
        raise ConfigError(
            f"plan: configure_model of {type(module).__name__} cannot run on the meta device "
            f"without a Trainer ({locate_error(error)}{describe_error(error)}). Build there what "
            "needs neither, and tensors whose values are read with device='cpu'."
        ) from error
    decisions = select_tables(copied, settings)
    if not decisions.tables:
        unsharded = "".join(
            f" '{path}' is not sharded: {reason}."
            for path, reason in list(decisions.left_alone.items())[:3]
        )
        raise ConfigError(
            f"plan: nothing to plan: {type(module).__name__} has no embedding tables that "
            f"torchrec_sharded would shard.{unsharded} See convert_embeddings and min_rows, or "
            "train it with another strategy."
        )
    # Decisions only ask whether losses are scaled. On a CPU Lightning takes bf16-mixed instead,
    # which has no scaler.
    plugin = SimpleNamespace(
        scaler=object() if precision == "16-mixed" and device.type == "cuda" else None
    )
    failed = ""
    try:
        # It may read self.trainer, as for estimated_stepping_batches. A plan by assumed updates is
        # better than none.
        optimizers = configured_optimizers(copied)
        decisions.optimizers = see_through(optimizers)
    except Exception as error:
        failed = describe_error(error)
    retained_for = why_kept(settings.groups)
    decide_updates(decisions, copied, trainer, plugin, device, {}, retained_for)
    assumed = [*decisions.warnings, *decisions.shipped]
    optimized_tables = set(decisions.in_backward)
    for own_optimizer in decisions.own_optimizers:
        optimized_tables.update(own_optimizer.tables)
    in_module = [record for record in decisions.records if record.name not in optimized_tables]
    if failed and in_module:
        assumed.append(
            f"configure_optimizers failed without a Trainer ({failed}): the user's optimizer is "
            f"assumed to update every table on its rank, with {UNKNOWN_TENSORS} elements of state "
            "for each of its own, as Adam"
        )
        for record in in_module:
            record.update = _assumed(record.table.parameter)
    return DryModule(
        module=copied,
        decisions=decisions,
        trainer=trainer,
        settings=settings,
        assumed=assumed,
    )


def _assumed(parameter: torch.Tensor) -> TableUpdate:
    if not parameter.requires_grad:
        return TableUpdate("frozen", "requires_grad=False")
    return TableUpdate(
        "sparse", "assumed", bytes_per_element=float(UNKNOWN_TENSORS * parameter.element_size())
    )


def default_type(precision: str) -> Any:
    """Return the context in which Lightning calls configure_model at this precision."""
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision).module_init_context()  # type: ignore[arg-type]
    return DoublePrecision().module_init_context() if precision == "64-true" else nullcontext()


def locate_error(error: BaseException) -> str:
    """Return which module's code raised, as "Scale.__init__, model.py:12: "; "" if none did."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        # The innermost frame in a module's method that is not torch's or Lightning's: the user's
        # line.
        frame = trace.tb_frame
        module = frame.f_locals.get("self")
        code_of = str(frame.f_globals.get("__name__", ""))
        if isinstance(module, torch.nn.Module) and not code_of.startswith(("torch.", "lightning.")):
            file = os.path.basename(frame.f_code.co_filename)
            place = f"{type(module).__name__}.{frame.f_code.co_name}, {file}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return place


def count_ids_in_data(module: Any, data: Any, num_batches: int) -> tuple[IdCounts, int | None]:
    """Return the ids in the first batches of each training dataloader, as one rank draws them; and
    its batch size.

    What a module computes of a batch is seen where it has `sparse_inputs`. Raises ConfigError: no
    data, or it fails.
    """
    counts = IdCounts()
    total = 0
    batch_size = None
    declare = getattr(module, "sparse_inputs", None)
    try:
        for loader in loaders_in(training_loaders(module, data)):
            # first_batches starts no workers for a few batches; what is no DataLoader is just
            # iterated.
            batches = (
                first_batches(loader, num_batches)
                if not peek_obstacle(loader)
                else islice(iter(loader), num_batches)
            )
            for batch in batches:
                parts = [batch] if declare is None else [batch, declare(batch)]
                counts.look_at(*parts)
                batch_size = batch_size or _num_examples(parts)
                total = total + 1
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--from-data: the data cannot be read ({describe_error(error)}). It is built as for "
            "fit, but without a Trainer; plan without --from-data, or set pooling_factor."
        ) from error
    if not total:
        raise ConfigError("--from-data: the training dataloader has no batch.")
    return counts, batch_size


def _num_examples(parts: list[Any]) -> int | None:
    for part in parts:
        # New counts, since those of all batches add the examples up.
        counts = IdCounts()
        counts.look_at(part)
        for count in (*counts.features.values(), *counts.tensors.values()):
            return count.examples
    return None


def training_loaders(module: Any, data: Any) -> Any:
    """Return what `fit` would read, set up as on one rank. Raises ConfigError: there is nothing."""
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    if not is_overridden("train_dataloader", module):
        raise ConfigError("the YAML has no data, and its module no train_dataloader.")
    return module.train_dataloader()


MAX_NAMED = 4
"""Number of tables that a message names."""


def with_counts(dry: DryModule, counts: IdCounts, batch_size: int | None) -> DryModule:
    """Return the module with ids in batches, for estimates; options that are set stay."""
    settings = dry.settings
    assumed = list(dry.assumed)
    if settings.batch_size_per_rank is None and batch_size:
        settings = replace(
            settings, batch_size_per_rank=batch_size, batch_size_origin="of the first batch"
        )
    unknown = [table.full_name for table in dry.decisions.tables if counts.factors(table) is None]
    if unknown:
        assumed.append(
            f"--from-data: no batch holds the features of {shortened(unknown, MAX_NAMED)} by name, "
            "nor does what sparse_inputs(batch) returns"
        )
    return replace(dry, counts=counts, settings=settings, assumed=assumed)


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
        """Which of the ranks that shard the tables among them share a node. Raises ConfigError: see
        sharding_groups."""
        all_ranks = NodeLayout.from_node_sizes(*[self.ranks_on_node] * self.num_nodes)
        return all_ranks.group_layout(checked_size(self.groups, self.num_ranks))


def make_decisions(dry: DryModule, job: DryJob) -> Decisions:
    """Return what is decided about the tables on these ranks."""
    records = list(map(replace, dry.decisions.records))
    decisions = replace(dry.decisions, records=records)
    decide_constraints(decisions, job.device, job.layout)
    constraints = decisions.constraints
    if dry.counts is not None:
        constraints = dry.counts.add_to(constraints, decisions.tables)
    # estimates take most of the time, and are not needed for kernels that cannot be chosen
    if not job.host_bytes:
        constraints = {
            name: _on_device(table_constraints) for name, table_constraints in constraints.items()
        }
    return decisions.with_constraints(constraints)


def _on_device(constraints: TableConstraints) -> TableConstraints:
    # Where the user has allowed kernels of the host alone, these stay.
    kernels = tuple(kernel for kernel in constraints.compute_kernels if kernel not in HOST_KERNELS)
    return replace(constraints, compute_kernels=kernels or constraints.compute_kernels)


def make_facts(dry: DryModule, job: DryJob) -> ClusterFacts:
    """Return what planning needs to know of the ranks. Raises PlanError: the reservation leaves
    nothing for tables."""
    planning = dry.settings.planning
    layout = job.layout
    reservation = reservation_of(planning.reserve, os.environ)
    # All ranks, also where sharding_groups divide the tables among fewer.
    shares = job.num_ranks if job.shards_dense else 1
    dense = dense_bytes(
        dry.module, dry.decisions.tables, dry.decisions.optimizers, dry.trainer.precision, shares
    )
    reservation = reservation.with_dense(dense, job.memory_bytes)
    # Nothing can be measured without ranks: defaults fill in, and the report mentions it.
    request = bandwidth_request(planning.bandwidths, os.environ)
    bandwidths = replace(request.with_measured({}, job.device.type), **job.bandwidths)
    # On a CPU a rank's memory is the host's already, and would count twice.
    on_host = job.host_bytes // job.ranks_on_node if job.device.type == "cuda" else 0
    memory = RankMemory(
        device_bytes=(job.memory_bytes,) * layout.num_ranks,
        host_bytes=(on_host,) * layout.num_ranks,
    )
    return ClusterFacts(
        layout=layout,
        topology=make_topology(job.device, layout, memory.less(reservation), bandwidths),
        devices=(job.device,) * layout.num_ranks,
        memory=memory,
        memory_origin=job.memory_origin,
        reservation=reservation,
        bandwidths=bandwidths,
        batch_size=dry.settings.batch_size_in_words,
        dense_bytes=dense,
    )


def describe_misfit(plan: ShardingPlan, plan_name: str) -> str:
    """Return which rank lacks memory for a plan; "" where none does. plan_name: what messages call
    it."""
    if plan.fits:
        return ""
    # One lack at a time, and the device's first.
    memory = plan.memory if plan.host_memory is None or not plan.memory.fits else plan.host_memory
    rank = memory.worst
    return (
        f"{plan_name} gives rank {rank} {format_bytes(memory.tables[rank])} of tables and their "
        f"exchange at batch_size_per_rank={plan.batch_size}, and it has "
        f"{format_bytes(memory.usable[rank])} for them."
    )


def bytes_of_tables(dry: DryModule) -> float:
    """Return the bytes of all tables, with the optimizer state and gradients that are kept."""
    total = 0.0
    for record in dry.decisions.records:
        weight = record.table.parameter
        update = record.update
        total += weight.numel() * (weight.element_size() + update.bytes_per_element)
        total += weight.shape[0] * update.bytes_per_row
    return total
