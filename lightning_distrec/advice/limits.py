"""The limits of a job, by doubling and halving: the largest batch per rank, and the minimum number of nodes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_distrec.advice.dry_job import DryJob, describe_misfit, make_decisions, make_facts
from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.decisions import Decisions
from lightning_distrec.strategies.tables.plan_of_run import cost_of, new_plan, plan_or_follow

# Ample: doubling to MAX_BATCH takes 25 tries, and halving to one part in FINENESS seven more.
MAX_TRIES = 60
FINENESS = 100
"""The largest number is found to within this fraction of it."""

ObstacleTo = Callable[[int], str]
"""Number -> why it is not possible; "" where it is."""


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


Following = Callable[[int | None, int | None], int | None]
"""The nearest possible and impossible number -> the number to try; None: the edge is found."""


class EdgeSearch:
    """One search. Numbers that are known beforehand are not tried."""

    def __init__(
        self, obstacle_to: ObstacleTo, obstacles: dict[int, str], max_seconds: float, seconds_of_try: float
    ) -> None:
        """obstacles: what is known already, as `obstacle_to` returns it. seconds_of_try: estimated for the first."""
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
            return (possible + impossible) // 2 if impossible - possible > max(1, possible // FINENESS) else None

        return self._search(following, max, min)

    def smallest(self, lower: int, upper: int) -> Edge:
        """Return the smallest possible number from `lower` to `upper`, by doubling from `lower` to save tries."""

        def following(possible: int | None, impossible: int | None) -> int | None:
            floor = max(lower - 1, impossible or 0)
            # The lower bound itself comes first. It is a bound by memory alone, and is often enough.
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
            possible = best((n for n, obstacle in self._obstacles.items() if not obstacle), default=None)
            # A misfit on the far side of a number that fits says nothing: plans are heuristic.
            misfits = (n for n, obstacle in self._obstacles.items() if obstacle)
            impossible = worst((n for n in misfits if possible is None or best(n, possible) == n), default=None)
            number = following(possible, impossible)
            if number is None or (stopped := self._try(number)):
                reason = self._obstacles.get(impossible, "")
                return Edge(possible=possible, impossible=impossible, reason=reason, tries=self._tries, stopped=stopped)

    def _try(self, number: int) -> str:
        """Try a number; or return why the search ends here."""
        begun = time.perf_counter()
        # The longest try so far is the guess for the next one, since larger numbers take longer.
        if begun - self._began + self._longest > self._max_seconds:
            return f"the next plan would have exceeded {self._max_seconds:g} s"
        if self._tries >= MAX_TRIES:
            return f"{MAX_TRIES} plans were tried"
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
    """Return the largest batch per rank that fits. An existing plan is tried first, because that is quick."""
    latest = [] if plan is None or misfit else [plan]
    follows = dry.settings.planning.plan_file is not None

    def obstacle_to(batch_size: int) -> str:
        settings = replace(dry.settings, batch_size_per_rank=batch_size)
        try:
            if latest:
                obstacle = describe_misfit(cost_of(decisions, latest[-1], settings, facts), "the plan in the file")
                # A plan of a file is the only one; other plans are searched for where it does not fit.
                if not obstacle or follows:
                    return obstacle
            planned = plan_or_follow(decisions, None, settings, facts)
        except InfeasiblePlanError as error:
            return str(error)
        if not (obstacle := describe_misfit(planned, "the plan in the file")):
            latest.append(planned)
        return obstacle

    start = dry.settings.batch_size
    return EdgeSearch(obstacle_to, {start: misfit}, SEARCH_SECONDS, seconds).largest(start, max(MAX_BATCH, start))


def find_min_nodes(dry: DryModule, job: DryJob, decisions: Decisions, misfit: str, seconds: float) -> Edge:
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
    lower = min(upper, _min_nodes_by_memory(dry, job, decisions))
    return EdgeSearch(obstacle_to, {job.num_nodes: misfit}, SEARCH_SECONDS, seconds).smallest(lower, upper)


def _min_nodes_by_memory(dry: DryModule, job: DryJob, decisions: Decisions) -> int:
    """Return a number of nodes below which the tables' rows and updates do not fit, however they are sharded."""
    needed = 0.0
    for table in decisions.tables:
        weight, update = table.parameter, dry.updates[table.full_name]
        needed += weight.numel() * (weight.element_size() + update.bytes_per_element)
        needed += weight.shape[0] * update.bytes_per_row
    # Of one node, all its ranks and its host: no sharding can use more of it.
    facts = make_facts(dry, replace(job, num_nodes=1))
    usable = facts.memory.less(facts.reservation)
    return max(1, math.ceil(needed / (sum(usable.device_bytes) + sum(usable.host_bytes))))
