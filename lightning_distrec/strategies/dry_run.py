"""A plan for ranks that are not there: the module is on the meta device, and nothing is trained or exchanged."""

import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

from lightning_distrec.errors import ConfigError, NoRoomError, PlanError
from lightning_distrec.optimizers.state_sizes import UNKNOWN_TENSORS
from lightning_distrec.optimizers.translation import TableUpdate
from lightning_distrec.sharding.bandwidths import Bandwidth, asked_bandwidths
from lightning_distrec.sharding.kernels import ROWS_ON_HOST
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.sharding.plan import Demand
from lightning_distrec.sharding.plan_facts import Origin, PlanFacts
from lightning_distrec.sharding.planner import MadePlan
from lightning_distrec.sharding.reservation import Reservation, chosen_reservation, is_measured
from lightning_distrec.sharding.topology import Places, RankMemory, make_topology
from lightning_distrec.sharding.written_plan import WrittenPlan, written_plan
from lightning_distrec.strategies.cluster_facts import ClusterFacts, names_of_bandwidths, weigh
from lightning_distrec.strategies.edge_search import Edge, EdgeSearch
from lightning_distrec.strategies.meta_copy import meta_copy, optimizers_of
from lightning_distrec.strategies.plan_files import wanted_plan
from lightning_distrec.strategies.table_decisions import (
    Decisions,
    TableSettings,
    WantedTables,
    demands_of,
    updates_in_fit,
    wanted_tables,
)
from lightning_distrec.strategies.table_plan import cost_of, facts_of_plan, plan_anew, plan_or_follow
from lightning_distrec.words import counted

MOST_BATCH = 2**24
"""Examples per rank from where on no larger batch is looked for."""
MOST_RANKS = 8192
"""Ranks from where on no more nodes are looked for."""
SEARCH_SECONDS = 60.0
"""How long each of the two searches may take."""


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
    def places(self) -> Places:
        """The ranks on their nodes."""
        return Places.of_nodes(*[self.ranks_on_node] * self.num_nodes)


@dataclass(frozen=True, kw_only=True)
class DryModule:
    """A module without memory, and what is decided about its tables whatever the ranks are."""

    module: LightningModule
    """Configured, on the meta device."""
    unconfigured: LightningModule
    wanted: WantedTables
    updates: dict[str, TableUpdate]
    trainer: Any
    """Has what decisions need of a Trainer."""
    settings: TableSettings
    said: list[str]
    """What was assumed."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What came of it."""

    job: DryJob
    batch_size: int
    num_tables: int
    table_bytes: int
    """Rows of all tables, once."""
    why_not: str
    """Why the tables do not fit; "" where they do."""
    planned_with: str
    origins: list[Origin]
    """The same for programs."""
    facts: PlanFacts | None = None
    """None where there is no plan."""
    plan: WrittenPlan | None = None
    seconds: float = 0.0
    """What planning took."""
    largest_batch: Edge | None = None
    fewest_nodes: Edge | None = None
    said: list[str] = field(default_factory=list)
    """What was assumed, and left out."""

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that its tables and their exchange need."""
        return not self.why_not


def dry_module(module: LightningModule, trainer: Any, settings: TableSettings, device: torch.device) -> DryModule:
    """Look at a module that was built on the meta device; it is left as it is.

    trainer: has callbacks, precision, accumulate_grad_batches and gradient_clip_val, as a Trainer would.
    Raises ConfigError: configure_model cannot run without memory, or without a Trainer; there are no tables. And what
    the strategy would refuse.
    """
    precision = trainer.precision
    try:
        with tables_on_meta(), _default_type(precision), torch.random.fork_rng(devices=[]):
            there = meta_copy(module)
    except Exception as error:
        raise ConfigError(
            f"plan: configure_model of {type(module).__name__} cannot run on the meta device without a Trainer "
            f"({place_of(error)}{_line(error)}). Build there what needs neither, and "
            "tensors whose values are read with device='cpu'."
        ) from error
    wanted = wanted_tables(there, settings)
    if not wanted.tables:
        alone = "".join(f" '{path}' is left alone: {why}." for path, why in list(wanted.left_alone.items())[:3])
        raise ConfigError(
            f"plan: nothing to plan: {type(module).__name__} has no embedding tables that torchrec_sharded would "
            f"shard.{alone} See convert_embeddings and min_rows, or train it with another strategy."
        )
    said = list(wanted.warnings)
    plugin = SimpleNamespace(scaler=object() if precision == "16-mixed" and device.type == "cuda" else None)
    try:
        optimizers = optimizers_of(there)
    except Exception as error:
        said.append(
            f"configure_optimizers failed without a Trainer ({_line(error)}): every table is taken to be updated by "
            f"the user's optimizer on its rank, with {UNKNOWN_TENSORS} numbers of state beside each of its own, as Adam"
        )
        updates = {table.full_name: _assumed(table.parameter) for table in wanted.tables}
    else:
        updates, more = updates_in_fit(wanted, there, optimizers, trainer, plugin, device, {})
        said += more
    return DryModule(
        module=there,
        unconfigured=module,
        wanted=wanted,
        updates=updates,
        trainer=trainer,
        settings=settings,
        said=said,
    )


def dry_run(dry: DryModule, job: DryJob, quick: bool = False) -> DryRun:
    """Return what a run on these ranks would be like. Nothing is exchanged or trained.

    quick: neither the largest batch nor the fewest nodes are looked for. Raises ConfigError, PlanError: the ranks, or
    what was said about tables, cannot be; tables that do not fit are no error.
    """
    settings, begun = dry.settings, time.perf_counter()
    look, facts = _decisions(dry, job), _facts(dry, job)
    followed = wanted_plan(settings.planning, os.environ)
    made, why_not = None, ""
    try:
        made = plan_or_follow(look, {}, settings, facts)
    except NoRoomError as error:
        why_not = str(error)
    told = None if made is None else facts_of_plan(look, settings, facts, made)
    if told is not None and not told.fits:
        why_not = _too_full(told, followed)
    seconds = time.perf_counter() - begun
    tables = dry.wanted.tables
    found = DryRun(
        job=job,
        batch_size=settings.batch_size_per_rank,
        num_tables=len(tables),
        table_bytes=sum(table.parameter.numel() * table.parameter.element_size() for table in tables),
        why_not=why_not,
        planned_with=facts.in_words,
        origins=facts.origins,
        facts=told,
        plan=None if made is None else written_plan(tables, made.plan, facts.places, job.device.type),
        seconds=seconds,
        said=[*dry.said, *_said(dry, job, facts.reservation)],
    )
    if quick:
        return replace(found, said=[*found.said, "--quick: neither the largest batch nor the fewest nodes were tried"])
    batch = _largest_batch(dry, look, facts, made, why_not, seconds)
    if followed is not None:
        said = [*found.said, f"how few nodes would do is not said, because {followed[1]} is for so many ranks"]
        return replace(found, largest_batch=batch, said=said)
    return replace(found, largest_batch=batch, fewest_nodes=_fewest_nodes(dry, job, look, why_not, seconds))


def _decisions(dry: DryModule, job: DryJob) -> Decisions:
    demands = demands_of(dry.wanted, dry.updates, job.device, job.places)
    if not job.host_bytes:  # what cannot be chosen need not be estimated, which takes most of the time
        demands = {name: _on_device(demand) for name, demand in demands.items()}
    return Decisions(dry.wanted.tables, [], dry.updates, demands, [], [])


def _on_device(demand: Demand) -> Demand:
    kernels = tuple(kernel for kernel in demand.compute_kernels if kernel not in ROWS_ON_HOST)
    return replace(demand, compute_kernels=kernels or demand.compute_kernels)


def _facts(dry: DryModule, job: DryJob) -> ClusterFacts:
    planning, places = dry.settings.planning, job.places
    weighed = None
    if is_measured(planning.reserve):
        with tables_on_meta(), _default_type(dry.trainer.precision):
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


def _largest_batch(
    dry: DryModule, look: Decisions, facts: ClusterFacts, made: MadePlan | None, why_not: str, seconds: float
) -> Edge:
    """Return how far examples per rank can go. A plan that is there is tried first, because that is quick."""
    latest = [] if made is None or why_not else [made]
    follows = wanted_plan(dry.settings.planning, os.environ) is not None

    def reason(batch_size: int) -> str:
        settings = replace(dry.settings, batch_size_per_rank=batch_size)
        try:
            if latest:
                held = cost_of(look, latest[-1].plan, settings, facts)
                if _fits(held):
                    return ""
                if follows:
                    return _too_full(facts_of_plan(look, settings, facts, held), ("", "the plan that is followed"))
            planned = plan_or_follow(look, {}, settings, facts)
            if not _fits(planned):
                return _too_full(facts_of_plan(look, settings, facts, planned), ("", "the plan that is followed"))
            latest.append(planned)
        except NoRoomError as error:
            return str(error)
        return ""

    start = dry.settings.batch_size_per_rank
    return EdgeSearch(reason, {start: why_not}, SEARCH_SECONDS, seconds).largest(start, max(MOST_BATCH, start))


def _fewest_nodes(dry: DryModule, job: DryJob, look: Decisions, why_not: str, seconds: float) -> Edge:
    """Return how few nodes would do, each with as many ranks as the job's."""

    def reason(num_nodes: int) -> str:
        other = replace(job, num_nodes=num_nodes)
        try:
            plan_anew(_decisions(dry, other), dry.settings, _facts(dry, other))
        except PlanError as error:
            return str(error)
        return ""

    most = max(job.num_nodes, MOST_RANKS // job.ranks_on_node)
    least = min(most, _least_nodes(dry, job, look))
    return EdgeSearch(reason, {job.num_nodes: why_not}, SEARCH_SECONDS, seconds).smallest(least, most)


def _least_nodes(dry: DryModule, job: DryJob, look: Decisions) -> int:
    """Return a number of nodes below which there is no room for the tables' rows, however they are placed."""
    needed = 0.0
    for table in look.tables:
        of_table, update = table.parameter, dry.updates[table.full_name]
        needed += of_table.numel() * (of_table.element_size() + update.bytes_per_element)
        needed += of_table.shape[0] * update.bytes_per_row
    one = replace(job, num_nodes=1)
    facts = _facts(dry, one)
    usable = facts.memory.less(facts.reservation)
    return max(1, math.ceil(needed / (sum(usable.device_bytes) + sum(usable.host_bytes))))


def _fits(made: MadePlan) -> bool:
    cost = made.cost
    return bool(
        (cost.device_bytes <= cost.device_bytes_usable).all() and (cost.host_bytes <= cost.host_bytes_usable).all()
    )


def _too_full(facts: PlanFacts, followed: tuple[str, str] | None) -> str:
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


def _said(dry: DryModule, job: DryJob, kept: Reservation) -> list[str]:
    planning, said = dry.settings.planning, []
    asked = asked_bandwidths(planning.bandwidths, os.environ)
    if missing := [name for name in asked.wanted if name not in job.bandwidths]:
        said.append(f"{', '.join(missing)} cannot be measured without ranks: torchrec's defaults are taken")
    if planning.estimate_pooling:
        said.append("planning.estimate_pooling: no data is read, so ids per example are not counted")
    unset = [name for name, options in dry.wanted.options.items() if options.pooling_factor is None]
    if unset:
        said.append(
            f"one id per example and feature is taken for {counted(len(unset), 'table')} without pooling_factor"
        )
    if job.device.type == "cuda" and not job.host_bytes:
        said.append("no table is put into the host's memory: say by --host-memory how much a node has")
    said.append(
        f"dense layers and their activations are not looked at: {kept.in_words} of a rank "
        f"is kept for them ({kept.origin}), however large the batch"
    )
    return said


def _assumed(parameter: torch.Tensor) -> TableUpdate:
    if not parameter.requires_grad:
        return TableUpdate("frozen", "requires_grad=False")
    return TableUpdate("sparse", "assumed", bytes_per_element=float(UNKNOWN_TENSORS * parameter.element_size()))


def _default_type(precision: str) -> Any:
    """Return the context in which Lightning calls configure_model at this precision."""
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision).module_init_context()  # type: ignore[arg-type]
    return DoublePrecision().module_init_context() if precision == "64-true" else nullcontext()


def place_of(error: BaseException) -> str:
    """Return which module's code raised, as "Scale.__init__, model.py:12: "; "" where no module's did."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        frame = trace.tb_frame
        here = frame.f_locals.get("self")
        code_of = str(frame.f_globals.get("__name__", ""))
        if isinstance(here, torch.nn.Module) and not code_of.startswith(("torch.", "lightning.")):
            file = os.path.basename(frame.f_code.co_filename)
            place = f"{type(here).__name__}.{frame.f_code.co_name}, {file}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return place


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
