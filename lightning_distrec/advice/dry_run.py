"""A plan for ranks that are not there: the module is on the meta device, and nothing is trained or exchanged."""

import os
import time
from dataclasses import dataclass, field, replace

from lightning_distrec.advice.dry_job import DryJob, decisions_of, facts_of, too_full
from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.advice.limit_search import Edge
from lightning_distrec.advice.limits import fewest_nodes_of, largest_batch_of
from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.sharding.plan_report.facts import Origin, PlanFacts
from lightning_distrec.sharding.planning.bandwidths import asked_bandwidths
from lightning_distrec.sharding.planning.reservation import Reservation
from lightning_distrec.sharding.planning.written_plan import WrittenPlan, written_plan
from lightning_distrec.strategies.tables.plan import facts_of_plan, plan_or_follow
from lightning_distrec.strategies.tables.plan_files import wanted_plan
from lightning_distrec.units import quantity


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


def dry_run(dry: DryModule, job: DryJob, quick: bool = False) -> DryRun:
    """Return what a run on these ranks would be like. Nothing is exchanged or trained.

    quick: neither the largest batch nor the fewest nodes are looked for. Raises ConfigError, PlanError: the ranks, or
    what was said about tables, cannot be; tables that do not fit are no error.
    """
    settings, begun = dry.settings, time.perf_counter()
    look, facts = decisions_of(dry, job), facts_of(dry, job)
    followed = wanted_plan(settings.planning, os.environ)
    made, why_not = None, ""
    try:
        made = plan_or_follow(look, {}, settings, facts)
    except InfeasiblePlanError as error:
        why_not = str(error)
    told = None if made is None else facts_of_plan(look, settings, facts, made)
    if told is not None and not told.fits:
        why_not = too_full(told, followed)
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
    batch = largest_batch_of(dry, look, facts, made, why_not, seconds)
    if followed is not None:
        said = [*found.said, f"how few nodes would do is not said, because {followed[1]} is for so many ranks"]
        return replace(found, largest_batch=batch, said=said)
    return replace(found, largest_batch=batch, fewest_nodes=fewest_nodes_of(dry, job, look, why_not, seconds))


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
            f"one id per example and feature is taken for {quantity(len(unset), 'table')} without pooling_factor"
        )
    if job.device.type == "cuda" and not job.host_bytes:
        said.append("no table is put into the host's memory: say by --host-memory how much a node has")
    said.append(
        f"dense layers and their activations are not looked at: {kept.in_words} of a rank "
        f"is kept for them ({kept.origin}), however large the batch"
    )
    return said
