"""How far a job can go: the largest batch of a rank, and the fewest nodes."""

import math
import os
from dataclasses import replace

from lightning_distrec.advice.dry_job import DryJob, decisions_of, facts_of, holds, too_full
from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.advice.limit_search import Edge, EdgeSearch
from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.planning.planner import MadePlan
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.decisions import (
    Decisions,
)
from lightning_distrec.strategies.tables.plan import cost_of, facts_of_plan, plan_anew, plan_or_follow
from lightning_distrec.strategies.tables.plan_files import wanted_plan

MOST_BATCH = 2**24
"""Examples per rank from where on no larger batch is looked for."""
MOST_RANKS = 8192
"""Ranks from where on no more nodes are looked for."""
SEARCH_SECONDS = 60.0
"""How long each of the two searches may take."""


def largest_batch_of(
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
                if holds(held):
                    return ""
                if follows:
                    return too_full(facts_of_plan(look, settings, facts, held), ("", "the plan that is followed"))
            planned = plan_or_follow(look, {}, settings, facts)
            if not holds(planned):
                return too_full(facts_of_plan(look, settings, facts, planned), ("", "the plan that is followed"))
            latest.append(planned)
        except InfeasiblePlanError as error:
            return str(error)
        return ""

    start = dry.settings.batch_size_per_rank
    return EdgeSearch(reason, {start: why_not}, SEARCH_SECONDS, seconds).largest(start, max(MOST_BATCH, start))


def fewest_nodes_of(dry: DryModule, job: DryJob, look: Decisions, why_not: str, seconds: float) -> Edge:
    """Return how few nodes would do, each with as many ranks as the job's."""

    def reason(num_nodes: int) -> str:
        other = replace(job, num_nodes=num_nodes)
        try:
            plan_anew(decisions_of(dry, other), dry.settings, facts_of(dry, other))
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
    facts = facts_of(dry, one)
    usable = facts.memory.less(facts.reservation)
    return max(1, math.ceil(needed / (sum(usable.device_bytes) + sum(usable.host_bytes))))
