"""A dry run: plans for ranks that do not exist, with the module on the meta device; nothing is trained."""

import os
import time
from dataclasses import dataclass, field, replace

from lightning_distrec.advice.dry_job import DryJob, describe_misfit, make_decisions, make_facts
from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.advice.limits import Edge, find_largest_batch, find_min_nodes
from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.sharding.planning.bandwidths import bandwidth_request
from lightning_distrec.sharding.planning.id_counts import IdCounts
from lightning_distrec.sharding.planning.sharding_plan import Origin, ShardingPlan
from lightning_distrec.sharding.planning.topology import Reservation
from lightning_distrec.strategies.tables.plan_of_run import plan_or_follow
from lightning_distrec.units import quantity


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of a dry run."""

    job: DryJob
    batch_size: int
    num_tables: int
    table_bytes: int
    """Rows of all tables, counted once."""
    misfit: str
    """Why the tables do not fit; "" if they do."""
    planned_with: str
    origins: list[Origin]
    """The same for programs."""
    plan: ShardingPlan | None = None
    """None where none was found."""
    seconds: float = 0.0
    """Time of planning."""
    largest_batch: Edge | None = None
    min_nodes: Edge | None = None
    assumed: list[str] = field(default_factory=list)
    """Assumptions, and what was left out."""

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that its tables and their exchange need."""
        return not self.misfit

    def with_assumed(self, *assumptions: str) -> "DryRun":
        """Return it with more assumptions."""
        return replace(self, assumed=[*self.assumed, *assumptions])


def dry_run(dry: DryModule, job: DryJob, quick: bool = False) -> DryRun:
    """Return what a run on these ranks would be like. Nothing is exchanged or trained.

    quick: do not search for the largest batch and the minimum number of nodes. Raises ConfigError, PlanError: options
    of ranks or tables contradict each other; tables that do not fit are no error.
    """
    settings, begun = dry.settings, time.perf_counter()
    decisions, facts = make_decisions(dry, job), make_facts(dry, job)
    plan_file = settings.planning.plan_file
    plan = None
    try:
        # None: there is no earlier plan whose rows should stay where they are.
        plan = plan_or_follow(decisions, None, settings, facts)
        misfit = describe_misfit(plan, "the plan" if plan_file is None else f"plan_file='{plan_file}'")
    # A result, not an error. Other PlanErrors mean that options contradict each other, and are raised.
    except InfeasiblePlanError as error:
        misfit = str(error)
    # The searches below begin no plan that would exceed their time, by this estimate.
    seconds = time.perf_counter() - begun
    tables = dry.selection.tables
    result = DryRun(
        job=job,
        batch_size=settings.batch_size,
        num_tables=len(tables),
        table_bytes=sum(table.parameter.numel() * table.parameter.element_size() for table in tables),
        misfit=misfit,
        planned_with=facts.in_words,
        origins=facts.origins,
        plan=plan,
        seconds=seconds,
        assumed=[*dry.assumed, *_assumed(dry, job, facts.reservation)],
    )
    if quick:
        return result.with_assumed("--quick: the largest batch and the minimum number of nodes were not searched for")
    result = replace(result, largest_batch=find_largest_batch(dry, decisions, facts, plan, misfit, seconds))
    if plan_file is not None:
        return result.with_assumed("the minimum number of nodes was not searched for: plan_file fixes the ranks")
    if job.groups.size is not None:
        return result.with_assumed("the minimum number of nodes was not searched for: sharding_groups set the ranks")
    return replace(result, min_nodes=find_min_nodes(dry, job, decisions, misfit, seconds))


def _assumed(dry: DryModule, job: DryJob, reservation: Reservation) -> list[str]:
    planning, assumed = dry.settings.planning, []
    request = bandwidth_request(planning.bandwidths, os.environ)
    if missing := [name for name in request.to_measure if name not in job.bandwidths]:
        assumed.append(f"{', '.join(missing)} cannot be measured without ranks: torchrec's defaults are used")
    if planning.estimate_pooling and dry.counts is None:
        assumed.append("planning.estimate_pooling: no data is read, so ids per example are not counted")
    counts, options = dry.counts or IdCounts(), dry.selection.options
    tables = [table for table in dry.selection.tables if options[table.full_name].pooling_factor is None]
    unset = [table for table in tables if counts.factors(table) is None]
    if unset:
        assumed.append(
            f"one id per example and feature is assumed for {quantity(len(unset), 'table')} without pooling_factor"
        )
    if job.device.type == "cuda" and not job.host_bytes:
        assumed.append("no table is put into the host's memory: set --host-memory to the memory of a node")
    assumed.append(
        f"activations are not estimated: {reservation.in_words} of a rank is reserved for them and for layers without "
        f"tables ({reservation.origin}), whatever the batch size"
    )
    return assumed
