"""The limits of a job: the largest batch per rank, and the minimum number of nodes."""

import math
from dataclasses import replace

from lightning_distrec.advice.dry_job import DryJob, decisions_of, facts_of, why_too_full
from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.advice.limit_search import Edge, EdgeSearch
from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.decisions import Decisions
from lightning_distrec.strategies.tables.plan_of_run import cost_of, new_plan, plan_or_follow

MAX_BATCH = 2**24
"""Largest number of examples per rank that is tried."""
MAX_RANKS = 8192
"""Largest number of ranks that is tried."""
SEARCH_SECONDS = 60.0
"""Limit of each of the two searches."""


def largest_batch_of(
    dry: DryModule,
    decisions: Decisions,
    facts: ClusterFacts,
    plan: ShardingPlan | None,
    why_not: str,
    seconds: float,
) -> Edge:
    """Return the largest batch per rank that fits. An existing plan is tried first, because that is quick."""
    latest = [] if plan is None or why_not else [plan]
    follows = dry.settings.planning.plan_file is not None

    def reason(batch_size: int) -> str:
        settings = replace(dry.settings, batch_size_per_rank=batch_size)
        try:
            if latest:
                why = why_too_full(cost_of(decisions, latest[-1], settings, facts), "the plan in the file")
                if not why or follows:
                    return why
            planned = plan_or_follow(decisions, None, settings, facts)
        except InfeasiblePlanError as error:
            return str(error)
        if not (why := why_too_full(planned, "the plan in the file")):
            latest.append(planned)
        return why

    start = dry.settings.batch_size
    return EdgeSearch(reason, {start: why_not}, SEARCH_SECONDS, seconds).largest(start, max(MAX_BATCH, start))


def min_nodes_of(dry: DryModule, job: DryJob, decisions: Decisions, why_not: str, seconds: float) -> Edge:
    """Return the minimum number of nodes that fit, each with as many ranks as the job's."""

    def reason(num_nodes: int) -> str:
        other = replace(job, num_nodes=num_nodes)
        try:
            new_plan(decisions_of(dry, other), dry.settings, facts_of(dry, other))
        except PlanError as error:
            return str(error)
        return ""

    upper = max(job.num_nodes, MAX_RANKS // job.ranks_on_node)
    lower = min(upper, _lower_bound_of_nodes(dry, job, decisions))
    return EdgeSearch(reason, {job.num_nodes: why_not}, SEARCH_SECONDS, seconds).smallest(lower, upper)


def _lower_bound_of_nodes(dry: DryModule, job: DryJob, decisions: Decisions) -> int:
    """Return a number of nodes below which the tables' rows and updates do not fit, however they are sharded."""
    needed = 0.0
    for table in decisions.tables:
        of_table, update = table.parameter, dry.updates[table.full_name]
        needed += of_table.numel() * (of_table.element_size() + update.bytes_per_element)
        needed += of_table.shape[0] * update.bytes_per_row
    one = replace(job, num_nodes=1)
    facts = facts_of(dry, one)
    usable = facts.memory.less(facts.reservation)
    return max(1, math.ceil(needed / (sum(usable.device_bytes) + sum(usable.host_bytes))))
