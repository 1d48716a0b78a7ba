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

from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.sharding_plan import TIME_PARTS, ShardingPlan
from lightning_distrec.sharding.planning.traffic import TRAFFIC_KINDS
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
    try:
        answer: Planned | str = (
            local.recv() if local.poll(WALL_TIMES * limit_seconds + START_SECONDS) else late
        )
    except EOFError:
        process.join()
        answer = (
            late
            if process.exitcode == -signal.SIGXCPU
            else (f"ended with exit code {process.exitcode}")
        )
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
        resource.setrlimit(
            resource.RLIMIT_CPU, (math.ceil(began + limit_seconds), resource.RLIM_INFINITY)
        )
    if planner == "default":
        critical_path = default_critical_path(inputs)
        return Planned(time.process_time() - began, critical_path, peak_bytes=_peak_bytes())
    made = Planner(
        inputs.tables, inputs.constraints, inputs.topology, inputs.batch_size
    ).make_plan()
    seconds, peak_bytes = time.process_time() - began, _peak_bytes()
    return Planned(
        seconds, made.cost.critical_path, made.cost.lower_bound, peak_bytes, _facts(made)
    )


def _facts(made: ShardingPlan) -> dict[str, Any]:
    """Return means and maxima over ranks: bytes held, bytes of a step by kind, milliseconds by
    part."""
    tables, traffic = list(made.tables.values()), made.traffic
    slowest = made.cost.milliseconds[made.cost.milliseconds_by_rank.argmax()]
    return {
        "row_bytes": sum(table.num_bytes for table in tables),
        "device_bytes_mean": float(made.cost.device_bytes.mean()),
        "device_bytes_max": int(made.cost.device_bytes.max()),
        "host_bytes_mean": float(made.cost.host_bytes.mean()),
        "within": {kind: float(traffic.within_node(kind).mean()) for kind in TRAFFIC_KINDS},
        "across": {kind: float(traffic.across_nodes(kind).mean()) for kind in TRAFFIC_KINDS},
        "sent_max": float(traffic.sent().max()),
        "across_max": float(traffic.across_nodes().max()),
        "milliseconds_mean": dict(
            zip(TIME_PARTS, made.cost.milliseconds.mean(axis=0).tolist(), strict=True)
        ),
        "milliseconds_slowest": dict(zip(TIME_PARTS, slowest.tolist(), strict=True)),
        "sharding_types": dict(Counter(table.sharding_type for table in tables)),
        "on_host": sum(table.on_host for table in tables),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
