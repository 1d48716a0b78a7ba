"""The limits of a job, by doubling and halving: the largest batch per rank, and the minimum number of nodes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_distrec.advice.dry_job import DryJob, decisions_of, facts_of, why_too_full
from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.decisions import Decisions
from lightning_distrec.strategies.tables.plan_of_run import cost_of, new_plan, plan_or_follow

MAX_TRIES = 60
FINENESS = 100
"""The largest number is found to within this fraction of it."""

WhyNot = Callable[[int], str]
"""Number -> why it is not possible; "" where it is."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The edge between possible and impossible numbers."""

    found: int | None
    """The last possible number; None if none was found."""
    beyond: int | None
    """The next number that was found impossible; None if none was."""
    why: str = ""
    """Why that is impossible."""
    tries: int = 0
    stopped: str = ""
    """Why the search ended early; "" if it did not."""


class _TimeIsUp(Exception):
    """The next try would take too long."""


class EdgeSearch:
    """One search. Numbers that are known beforehand are not tried."""

    def __init__(self, why_not: WhyNot, known: dict[int, str], max_seconds: float, seconds_of_try: float) -> None:
        """known: number -> the result of `why_not`. seconds_of_try: estimated time of the first try."""
        self._why_not = why_not
        self._known = dict(known)
        self._max_seconds = max_seconds
        self._longest = seconds_of_try
        self._began = time.perf_counter()
        self._tries = 0

    def largest(self, start: int, upper: int) -> Edge:
        """Return the largest possible number from 1 to `upper`; `start` is tried first."""
        found = beyond = None
        stopped = ""
        try:
            number = start
            if self._can(number):
                found = number
                while beyond is None and found < upper:
                    number = min(upper, 1 << found.bit_length())
                    found, beyond = (number, None) if self._can(number) else (found, number)
            else:
                beyond = number
                while found is None and beyond > 1:
                    number = 1 << (beyond - 1).bit_length() - 1
                    found, beyond = (number, beyond) if self._can(number) else (None, number)
            while found is not None and beyond is not None and beyond - found > max(1, found // FINENESS):
                number = (found + beyond) // 2
                found, beyond = (number, beyond) if self._can(number) else (found, number)
        except _TimeIsUp as up:
            stopped = str(up)
        return self._edge(found, beyond, stopped)

    def smallest(self, lower: int, upper: int) -> Edge:
        """Return the smallest possible number from `lower` to `upper`, by doubling from `lower` to save tries."""
        found = min((n for n, why in self._known.items() if not why), default=None)
        beyond = max((n for n, why in self._known.items() if why and (found is None or n < found)), default=None)
        floor = max(lower - 1, beyond or 0)
        stopped = ""
        try:
            number = floor + 1
            while number <= upper and (found is None or number < found):
                if self._can(number):
                    found = number
                else:
                    floor = beyond = number
                    following = 1 << number.bit_length()
                    number = min(following, upper) if number < upper else following
            while found is not None and found - floor > 1:
                number = (found + floor) // 2
                if self._can(number):
                    found = number
                else:
                    floor = beyond = number
        except _TimeIsUp as up:
            stopped = str(up)
        return self._edge(found, beyond, stopped)

    def _edge(self, found: int | None, beyond: int | None, stopped: str) -> Edge:
        why = "" if beyond is None else self._known[beyond]
        return Edge(found=found, beyond=beyond, why=why, tries=self._tries, stopped=stopped)

    def _can(self, number: int) -> bool:
        if number not in self._known:
            spent = time.perf_counter() - self._began
            if spent + self._longest > self._max_seconds:
                raise _TimeIsUp(f"the next plan would have exceeded {self._max_seconds:g} s")
            if self._tries >= MAX_TRIES:
                raise _TimeIsUp(f"{MAX_TRIES} plans were tried")
            begun = time.perf_counter()
            self._known[number] = self._why_not(number)
            self._tries += 1
            self._longest = max(self._longest, time.perf_counter() - begun)
        return not self._known[number]


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
