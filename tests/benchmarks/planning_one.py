"""One call of a planner in a process of its own, so that its time and memory are its own and it can
be stopped."""

import math
import multiprocessing
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from tests.benchmarks.planning_jobs import Job
from tests.support.planned_tables import default_critical_path

PlannerName = Literal["ours", "default"]
WALL_TIMES, START_SECONDS = 6, 120
"""How much longer than its limit a process may take by the clock, and until it has begun."""


@dataclass(frozen=True)
class Planned:
    """What came of a call."""

    seconds: float
    """Time of the processor, on one thread."""
    critical_path: float
    """Milliseconds of the slowest rank, as torchrec's estimators have it."""
    lower_bound: float | None = None
    peak_bytes: int = 0
    """The most memory that the process had, torch included."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the plan says of ranks and bytes, see `_facts`."""


def run_one(planner: PlannerName, job: Job, limit_seconds: float) -> Planned | str:
    """Return what a planner comes to in a process of its own, or why it came to nothing.

    limit_seconds: of the processor, so that it does not depend on what else the machine does.
    """
    late = f"not ended after {limit_seconds:.0f} s"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.planning_one"])
    local, remote = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(remote, planner, job, limit_seconds))
    process.start()
    remote.close()
    answer: Planned | str = late
    try:
        if local.poll(WALL_TIMES * limit_seconds + START_SECONDS):
            answer = local.recv()
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGXCPU:
            answer = f"ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    return answer


def _send(remote: Connection, planner: PlannerName, job: Job, limit_seconds: float) -> None:
    try:
        remote.send(plan_here(planner, job, limit_seconds))
    except Exception as error:
        remote.send(f"{type(error).__name__}: {error}")


def plan_here(planner: PlannerName, job: Job, limit_seconds: float | None = None) -> Planned:
    """Return what a planner comes to in this process, which ends by SIGXCPU after `limit_seconds`
    of the processor."""
    inputs = job.tables()
    began = time.process_time()
    if limit_seconds is not None:
        last_second = math.ceil(began + limit_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (last_second, resource.RLIM_INFINITY))
    if planner == "default":
        critical_path = default_critical_path(inputs)
        return Planned(time.process_time() - began, critical_path, peak_bytes=_peak_bytes())
    plan = inputs.planner().make_plan()
    seconds, cost = time.process_time() - began, plan.cost
    return Planned(seconds, cost.critical_path, cost.lower_bound, _peak_bytes(), _facts(plan))


def _facts(plan: ShardingPlan) -> dict[str, Any]:
    """Return means and maxima over ranks: bytes held, bytes sent in a step, milliseconds."""
    tables, traffic = list(plan.tables.values()), plan.traffic
    device_bytes, milliseconds = plan.cost.device_bytes, plan.cost.milliseconds
    return {
        "row_bytes": sum(table.num_bytes for table in tables),
        "device_bytes_mean": float(device_bytes.mean()),
        "device_bytes_max": int(device_bytes.max()),
        "bytes_within_nodes": float(traffic.within_node().mean()),
        "bytes_across_nodes": float(traffic.across_nodes().mean()),
        "bytes_across_nodes_max": float(traffic.across_nodes().max()),
        "milliseconds_mean": float(milliseconds.sum(axis=1).mean()),
        "sharding_types": dict(Counter(table.sharding_type for table in tables)),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
