"""A dry run: plans for ranks that do not exist, the largest batch and the minimum number of
nodes."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_distrec.advice.dry_job import (
    DryJob,
    DryModule,
    bytes_of_tables,
    describe_misfit,
    make_decisions,
    make_facts,
)
from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.planning.bandwidths import bandwidth_request
from lightning_distrec.sharding.planning.id_counts import IdCounts
from lightning_distrec.sharding.planning.sharding_plan import Origin, ShardingPlan
from lightning_distrec.sharding.planning.topology import Reservation
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.plan_of_run import cost_of, new_plan, plan_or_follow
from lightning_distrec.strategies.tables.set_up_inputs import Decisions
from lightning_distrec.units import quantity

FINENESS = 100
"""The largest number is found to within this fraction of it."""

ObstacleTo = Callable[[int], str]
"""Number -> why it is not possible; "" where it is."""
Following = Callable[[int | None, int | None], int | None]
"""The nearest possible and impossible number -> the number to try; None: the edge is found."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The edge between possible and impossible numbers."""

    possible: int | None
    """The last possible number; None if none was found."""
    impossible: int | None
    """The next number that was found impossible; None if none was."""
    reason: str = ""
    """Why that is impossible."""
    tries: int = 0
    stopped: str = ""
    """Why the search ended early; "" if it did not."""


class EdgeSearch:
    """One search. Numbers that are known beforehand are not tried."""

    def __init__(
        self,
        obstacle_to: ObstacleTo,
        obstacles: dict[int, str],
        max_seconds: float,
        seconds_of_try: float,
    ) -> None:
        """obstacles: what is known already, as `obstacle_to` returns it. seconds_of_try: estimated
        for the first."""
        self._obstacle_to = obstacle_to
        self._obstacles = dict(obstacles)
        self._max_seconds = max_seconds
        self._longest = seconds_of_try
        self._began = time.perf_counter()
        self._tries = 0

    def largest(self, start: int, upper: int) -> Edge:
        """Return the largest possible number from 1 to `upper`; `start` is tried first."""

        def following(possible: int | None, impossible: int | None) -> int | None:
            if impossible is None:
                if possible is None:
                    return start
                # The next power of two.
                return min(upper, 1 << possible.bit_length()) if possible < upper else None
            if possible is None:
                # The largest power of two below it: `<<` binds less tightly than `-`.
                return 1 << (impossible - 1).bit_length() - 1 if impossible > 1 else None
            return (
                (possible + impossible) // 2
                if impossible - possible > max(1, possible // FINENESS)
                else None
            )

        return self._search(following, max, min)

    def smallest(self, lower: int, upper: int) -> Edge:
        """Return the smallest possible number from `lower` to `upper`, by doubling from `lower` to
        save tries."""

        def following(possible: int | None, impossible: int | None) -> int | None:
            floor = max(lower - 1, impossible or 0)
            # The lower bound itself comes first. It is a bound by memory alone, and is often
            # enough.
            doubled = 1 << floor.bit_length() if self._tries else floor + 1
            if floor < upper:
                doubled = min(doubled, upper)
            if doubled <= upper and (possible is None or doubled < possible):
                return doubled
            if possible is not None and possible - floor > 1:
                return (possible + floor) // 2
            return None

        return self._search(following, min, max)

    def _search(self, following: Following, best: Any, worst: Any) -> Edge:
        stopped = ""
        while True:
            fitting = [n for n, obstacle in self._obstacles.items() if not obstacle]
            misfits = [n for n, obstacle in self._obstacles.items() if obstacle]
            possible = best(fitting, default=None)
            if possible is not None:
                # A misfit on the far side of a number that fits says nothing: plans are heuristic.
                misfits = [n for n in misfits if best(n, possible) == n]
            impossible = worst(misfits, default=None)
            number = following(possible, impossible)
            if number is not None:
                stopped = self._try(number)
            if number is None or stopped:
                reason = self._obstacles.get(impossible, "")
                return Edge(
                    possible=possible,
                    impossible=impossible,
                    reason=reason,
                    tries=self._tries,
                    stopped=stopped,
                )

    def _try(self, number: int) -> str:
        """Try a number; or return why the search ends here."""
        begun = time.perf_counter()
        # The longest try so far is the guess for the next one, since larger numbers take longer.
        if begun - self._began + self._longest > self._max_seconds:
            return f"the next plan would have exceeded {self._max_seconds:g} s"
        self._obstacles[number] = self._obstacle_to(number)
        self._tries += 1
        self._longest = max(self._longest, time.perf_counter() - begun)
        return ""


MAX_BATCH = 2**24
"""Largest number of examples per rank that is tried."""
MAX_RANKS = 8192
"""Largest number of ranks that is tried."""
SEARCH_SECONDS = 60.0
"""Limit of each of the two searches."""


def find_largest_batch(
    dry: DryModule,
    decisions: Decisions,
    facts: ClusterFacts,
    plan: ShardingPlan | None,
    misfit: str,
    seconds: float,
) -> Edge:
    """Return the largest batch per rank that fits. An existing plan is tried first, because that is
    quick."""
    latest = [] if plan is None or misfit else [plan]
    follows = dry.settings.planning.plan_file is not None

    def obstacle_to(batch_size: int) -> str:
        settings = replace(dry.settings, batch_size_per_rank=batch_size)
        try:
            if latest:
                obstacle = describe_misfit(
                    cost_of(decisions, latest[-1], settings, facts), "the plan in the file"
                )
                # A plan of a file is the only one; other plans are searched for where it does not
                # fit.
                if not obstacle or follows:
                    return obstacle
            planned = plan_or_follow(decisions, None, settings, facts)
        except InfeasiblePlanError as error:
            return str(error)
        obstacle = describe_misfit(planned, "the plan in the file")
        if not obstacle:
            latest.append(planned)
        return obstacle

    start = dry.settings.batch_size
    return EdgeSearch(obstacle_to, {start: misfit}, SEARCH_SECONDS, seconds).largest(
        start, max(MAX_BATCH, start)
    )


def find_min_nodes(dry: DryModule, job: DryJob, misfit: str, seconds: float) -> Edge:
    """Return the minimum number of nodes that fit, each with as many ranks as the job's."""

    def obstacle_to(num_nodes: int) -> str:
        other = replace(job, num_nodes=num_nodes)
        try:
            new_plan(make_decisions(dry, other), dry.settings, make_facts(dry, other))
        # Any PlanError: a number of nodes may also contradict the options of a table.
        except PlanError as error:
            return str(error)
        return ""

    upper = max(job.num_nodes, MAX_RANKS // job.ranks_on_node)
    lower = min(upper, _min_nodes_by_memory(dry, job))
    return EdgeSearch(obstacle_to, {job.num_nodes: misfit}, SEARCH_SECONDS, seconds).smallest(
        lower, upper
    )


def _min_nodes_by_memory(dry: DryModule, job: DryJob) -> int:
    """Return a number of nodes below which rows and updates do not fit, however sharded."""
    # Of one node, all its ranks and its host: no sharding can use more of it.
    facts = make_facts(dry, replace(job, num_nodes=1))
    usable = facts.memory.less(facts.reservation)
    usable_bytes = sum(usable.device_bytes) + sum(usable.host_bytes)
    return max(1, math.ceil(bytes_of_tables(dry) / usable_bytes))


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


def dry_run(dry: DryModule, job: DryJob, quick: bool = False) -> DryRun:
    """Return what a run on these ranks would be like. Nothing is exchanged or trained.

    quick: without the searches for limits. Raises ConfigError, PlanError: options contradict each
    other; tables that do not fit are no error.
    """
    settings = dry.settings
    begun = time.perf_counter()
    decisions = make_decisions(dry, job)
    facts = make_facts(dry, job)
    plan_file = settings.planning.plan_file
    plan = None
    try:
        # None: there is no earlier plan whose rows should stay where they are.
        plan = plan_or_follow(decisions, None, settings, facts)
        misfit = describe_misfit(
            plan, "the plan" if plan_file is None else f"plan_file='{plan_file}'"
        )
    # A result, not an error. Other PlanErrors mean that options contradict each other, and are
    # raised.
    except InfeasiblePlanError as error:
        misfit = str(error)
    # The searches below begin no plan that would exceed their time, by this estimate.
    seconds = time.perf_counter() - begun
    tables = dry.decisions.tables
    result = DryRun(
        job=job,
        batch_size=settings.batch_size,
        num_tables=len(tables),
        table_bytes=sum(
            table.parameter.numel() * table.parameter.element_size() for table in tables
        ),
        misfit=misfit,
        planned_with=facts.in_words,
        origins=facts.origins,
        plan=plan,
        seconds=seconds,
        assumed=[*dry.assumed, *_assumed(dry, job, facts.reservation)],
    )
    if quick:
        result.assumed.append(
            "--quick: the largest batch and the minimum number of nodes were not searched for"
        )
        return result
    result = replace(
        result, largest_batch=find_largest_batch(dry, decisions, facts, plan, misfit, seconds)
    )
    fixed = "sharding_groups" if job.groups.size is not None else ""
    if plan_file is not None:
        fixed = "plan_file"
    if fixed:
        result.assumed.append(
            f"the minimum number of nodes was not searched for: {fixed} fixes the ranks"
        )
        return result
    return replace(result, min_nodes=find_min_nodes(dry, job, misfit, seconds))


def _assumed(dry: DryModule, job: DryJob, reservation: Reservation) -> list[str]:
    planning = dry.settings.planning
    assumed = []
    request = bandwidth_request(planning.bandwidths, os.environ)
    missing = [name for name in request.to_measure if name not in job.bandwidths]
    if missing:
        assumed.append(f"{', '.join(missing)} cannot be measured without ranks: defaults are used")
    if planning.estimate_pooling and dry.counts is None:
        assumed.append(
            "planning.estimate_pooling: no data is read, so ids per example are not counted"
        )
    counts = dry.counts or IdCounts()
    unset = []
    for record in dry.decisions.records:
        if record.options.pooling_factor is None and counts.factors(record.table) is None:
            unset.append(record.table)
    if unset:
        assumed.append(
            f"one id per example and feature is assumed for {quantity(len(unset), 'table')} "
            "without pooling_factor"
        )
    if job.device.type == "cuda" and not job.host_bytes:
        assumed.append(
            "no table is put into the host's memory: set --host-memory to the memory of a node"
        )
    assumed.append(
        f"activations are not estimated: {reservation.in_words} of a rank is reserved for them and "
        f"for layers without tables ({reservation.origin}), whatever the batch size"
    )
    return assumed
