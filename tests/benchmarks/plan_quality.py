"""Times plans over a link of limited rate: is the one with the shortest estimate the fastest?

    python -m tests.benchmarks.plan_quality [--ranks 2 4] [--rates 50 200] [--rounds N] [--plans N]
    [--quick] [--write]

All of it takes about fifteen minutes on two cores that do nothing else; it needs root, `ip` and
`tc`. All plans take turns in one set of processes; each turn is a fit of its own. Timed are our
plan and torchrec's with measured and with default bandwidths, the best plan of each sharding type,
and a random sample.
"""

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.cluster.consensus import job_consensus
from lightning_distrec.sharding.planning.bandwidths import (
    NAMES,
    AssumedBandwidths,
    bandwidth_request,
    measured_bandwidths,
)
from lightning_distrec.sharding.planning.plan_file import PLAN_FILE, load_plan, save_plan
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.units import format_bandwidth
from tests.benchmarks.limited_link import run_on_link
from tests.benchmarks.plan_quality_plans import (
    BATCH_SIZE,
    MEMORY_BYTES,
    TABLE_OPTIONS,
    LitTables,
    batches,
    key_of,
    plans_of_one_type,
    sampled_plans,
    tables_on,
)
from tests.benchmarks.report import Row, start, table
from tests.benchmarks.turns import Clock, Timed, Turn, in_silence, join_ranks, turns
from tests.support.click_model import NO_OUTPUT
from tests.support.planned_tables import default_bandwidths, default_plan

OURS, OURS_DEFAULT = "ours", "ours, default bandwidths"
TORCHRECS, TORCHRECS_DEFAULT = "torchrec's, measured bandwidths", "torchrec's"
PLANNERS = (OURS, OURS_DEFAULT, TORCHRECS, TORCHRECS_DEFAULT)
AIM = 1.10
"""The most that our plan's step may take, in units of the best that was timed."""


@dataclass(frozen=True)
class Job:
    """What is timed, and how often."""

    layout: NodeLayout
    num_plans: int
    rounds: int
    turn: Turn = field(default_factory=lambda: Turn(first=4, counted=7, last=3))


@dataclass
class TimedPlan(Timed):
    """One plan, and what rank 0 measured of it."""

    plan: ShardingPlan | None = None
    estimate: float = 0.0
    """Milliseconds of its critical path, by measured bandwidths."""
    estimate_default: float = 0.0
    """... by torchrec's."""


@dataclass(frozen=True)
class Measured:
    """What was measured on some ranks."""

    plans: dict[str, TimedPlan]
    equal_plans: dict[str, str]
    """Planner, or sharding type -> the name under which its plan was timed."""
    bandwidths: AssumedBandwidths

    @property
    def best(self) -> float:
        """Milliseconds of the fastest plan."""
        return min(timed.lower_quartile for timed in self.plans.values())

    def over_best(self, planner: str) -> float:
        """Return the step time of a planner's plan over that of the best plan."""
        return self.plans[self.equal_plans[planner]].lower_quartile / self.best


def take_turns(job: Job) -> Measured:
    """Collective. Time all plans on these ranks; rank 0's result counts."""
    join_ranks()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    with in_silence():
        bandwidths = _measured_bandwidths(job.layout)
        results: list[Any] = [None]
        planned = _plans_of_fits(job, bandwidths, Path(folder[0]))
        if dist.get_rank() == 0:
            results = [_select_plans(job, bandwidths, planned)]
        dist.broadcast_object_list(results)
        measured: Measured = results[0]
        path = str(Path(folder[0], "plan.json"))
        for name in turns(list(measured.plans), job.rounds):
            timed = measured.plans[name]
            dist.barrier()  # all have read the plan of the turn before
            if dist.get_rank() == 0:
                save_plan(path, timed.plan)
            dist.barrier()
            timed.rounds.append(job.turn.times(_fit(job, {"plan_file": path})))
        dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)
    return measured


def _measured_bandwidths(layout: NodeLayout) -> AssumedBandwidths:
    """Collective. Return what a fit with bandwidths="measure" would plan with."""
    ranks, device = job_consensus(60.0).general, torch.device("cpu")
    request = bandwidth_request("measure", {})
    measured = measured_bandwidths(request.to_measure, layout, device, ranks)
    return request.with_measured(measured, "cpu")


def _plans_of_fits(
    job: Job, bandwidths: AssumedBandwidths, folder: Path
) -> dict[str, ShardingPlan]:
    """Collective. Return the plans of fits that plan by themselves."""
    # The same for fits and planners: a second measurement would give other numbers.
    rates = {name: getattr(bandwidths, name).bytes_per_second for name in NAMES}
    plans = {}
    for name, planning in ((OURS, {"bandwidths": rates}), (OURS_DEFAULT, {})):
        logger = CSVLogger(folder / name)
        _fit(job, planning, limit_train_batches=1, logger=logger)
        dist.barrier()
        plans[name] = load_plan(next((folder / name).rglob(PLAN_FILE)))
    return plans


def _select_plans(
    job: Job, bandwidths: AssumedBandwidths, planned: dict[str, ShardingPlan]
) -> Measured:
    """Return the plans to be timed, each once."""
    measured, default = (
        tables_on(job.layout, rates) for rates in (bandwidths, default_bandwidths())
    )
    named = dict(planned)
    named[TORCHRECS] = default_plan(measured)
    named[TORCHRECS_DEFAULT] = default_plan(default)
    named |= plans_of_one_type(measured)
    first_names: dict[Any, str] = {}
    equal_plans, distinct = {}, {}
    for name, plan in named.items():
        first = first_names.setdefault(key_of(plan), name)
        equal_plans[name], distinct[first] = first, named[first]
    plans = {}
    for name, plan in sampled_plans(job.layout, distinct, job.num_plans, seed=0).items():
        estimate = measured.planner().estimate(plan).cost.critical_path
        estimate_default = default.planner().estimate(plan).cost.critical_path
        plans[name] = TimedPlan([], [], plan, estimate, estimate_default)
    return Measured(plans, equal_plans, bandwidths)


def _fit(job: Job, planning: dict[str, Any], **trainer_options: Any) -> list[float]:
    """Collective. Return the seconds at which the steps of a fit began."""
    clock = Clock()
    ranks_on_node = job.layout.ranks_on_node
    strategy = TorchRecShardedStrategy(
        tables={f"t{number}": options for number, options in TABLE_OPTIONS.items()},
        batch_size_per_rank=BATCH_SIZE,
        memory_bytes_per_rank=MEMORY_BYTES,
        planning=planning,
        watchdog_seconds=0,
    )
    selection = NO_OUTPUT | {
        "accelerator": "cpu",
        "devices": ranks_on_node,
        "num_nodes": job.layout.num_ranks // ranks_on_node,
        "max_epochs": 1,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(strategy=strategy, callbacks=[clock], **selection | trainer_options)
    trainer.fit(LitTables(), batches(job.turn.steps, dist.get_rank()))
    return clock.ticks


def rank_correlation(first: list[float], other: list[float]) -> float:
    """Return Spearman's: how far two lists order the same things alike, from -1 to 1; 0 where one
    orders nothing."""
    orders = [_places(first), _places(other)]
    if any(np.ptp(order) == 0 for order in orders):
        return 0.0
    return float(np.corrcoef(*orders)[0, 1])


def _places(values: list[float]) -> np.ndarray:
    """Return each value's place in their order; equal values share the mean of theirs."""
    column = np.asarray(values)[:, None]
    smaller = (column > column.T).sum(axis=1)
    equal = (column == column.T).sum(axis=1)
    return smaller + equal / 2


def cells(place: str, measured: Measured) -> list[str]:
    """Return a line of the table."""
    plans = list(measured.plans.values())
    times = [timed.lower_quartile for timed in plans]
    spreads = [max(timed.medians()) / min(timed.medians()) for timed in plans]
    estimates = [timed.estimate for timed in plans]
    estimates_default = [timed.estimate_default for timed in plans]
    return [
        place,
        str(len(plans)),
        f"{min(times):.1f}",
        f"{statistics.median(spreads):.2f}",
        f"{max(times) / min(times):.2f}",
        *(f"{measured.over_best(planner):.3f}" for planner in PLANNERS),
        f"{rank_correlation(estimates, times):.2f}",
        f"{rank_correlation(estimates_default, times):.2f}",
        format_bandwidth(measured.bandwidths.cross_node.bytes_per_second),
    ]


HEADER = [
    *("", "plans timed", "best, ms", "turns differ by", "worst / best"),
    *(f"{planner} / best" for planner in PLANNERS),
    *("rank correlation", "... by default bandwidths", "measured cross_node"),
]


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "plan_quality",
        __doc__,
        ranks={"nargs": "+", "type": int, "default": [2, 4], "help": "half on each side"},
        rates={"nargs": "+", "type": int, "default": [50, 200], "help": "of the link, in Mbit/s"},
        rounds={"type": int, "default": 3, "help": "turns of each plan"},
        plans={"type": int, "default": 24, "help": "plans that take turns"},
    )
    options = report.options
    results: dict[str, Measured] = {}
    for num_ranks in options.ranks:
        layout = NodeLayout.from_node_sizes(num_ranks // 2, num_ranks // 2)
        job = Job(layout, options.plans, options.rounds)
        if options.quick:
            job = Job(layout, 9, 1, Turn(first=1, counted=2, last=1))
        for rate in options.rates:
            place = f"{num_ranks} ranks, {rate} Mbit/s"
            limits = {"mbit_per_second": rate, "ranks_on_machine": num_ranks // 2}
            measured = report.attempt(place, run_on_link, take_turns, job, **limits)
            if measured is not None:
                results[place] = measured
                report.rows.append(Row(f"{place}: ours / best", measured.over_best(OURS), AIM))
    lines = [cells(place, measured) for place, measured in results.items()]
    report.sections.append(table(HEADER, lines))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import plan_quality

    sys.exit(plan_quality.main())
