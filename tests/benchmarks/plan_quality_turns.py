"""All plans take turns in one set of processes, in another order in every round; each turn is a fit
of its own."""

import gc
import io
import random
import statistics
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
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
from tests.benchmarks.performance_contenders import Clock, Turn
from tests.benchmarks.performance_rounds import silence
from tests.benchmarks.plan_quality_model import BATCH_SIZE, LitTables, batches, options
from tests.benchmarks.plan_quality_plans import MEMORY_BYTES, Space, default_bandwidths, sampled
from tests.support.click_model import NO_OUTPUT

OURS, OURS_DEFAULT = "ours", "ours, default bandwidths"
TORCHRECS, TORCHRECS_DEFAULT = "torchrec's, measured bandwidths", "torchrec's"


@dataclass(frozen=True)
class Job:
    """What is timed, and how often."""

    places: NodeLayout
    num_plans: int = 26
    rounds: int = 4
    turn: Turn = field(default_factory=lambda: Turn(first=4, counted=7, last=3))
    seed: int = 0


@dataclass
class Tried:
    """One plan, and what rank 0 saw of it."""

    plan: ShardingPlan
    estimate: float
    """Milliseconds of its critical path, by measured bandwidths."""
    estimate_default: float
    """... by torchrec's."""
    rounds: list[list[float]] = field(default_factory=list)
    """Milliseconds of the steps of each turn."""

    @property
    def milliseconds(self) -> float:
        """The time that a quarter of all steps of all rounds do not exceed: other load on the
        machine only adds."""
        return float(np.percentile([step for steps in self.rounds for step in steps], 25))

    @property
    def spread(self) -> float:
        """The slowest turn's median over the fastest one's."""
        medians = [statistics.median(steps) for steps in self.rounds]
        return max(medians) / min(medians)


@dataclass(frozen=True)
class Measured:
    """What was measured on some ranks."""

    plans: dict[str, Tried]
    equal_plans: dict[str, str]
    """Planner -> the plan that it chose, under the name under which it was timed."""
    size: int
    """Number of plans that there are."""
    bandwidths: AssumedBandwidths


def take_turns(job: Job, folder: Path) -> Measured:
    """Collective. Time all plans on these ranks, that share `folder` and a process group; rank 0's
    result counts."""
    silence()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _take_turns(job, folder)


def _take_turns(job: Job, folder: Path) -> Measured:
    bandwidths = _measured(job.places)
    # The same for fits and planners: a second measurement would give other numbers.
    as_argument = {name: getattr(bandwidths, name).bytes_per_second for name in NAMES}
    selection = {
        OURS: _chosen(job, folder / "measured", {"bandwidths": as_argument}),
        OURS_DEFAULT: _chosen(job, folder / "default", {}),
    }
    space = Space(job.places)
    actual: list[Any] = [None]
    if dist.get_rank() == 0:
        selection[TORCHRECS] = space.torchrecs(bandwidths)
        selection[TORCHRECS_DEFAULT] = space.torchrecs(default_bandwidths())
        named = selection | space.of_one_type(bandwidths)
        is_equal = _same(space, named)
        remaining = {name: named[name] for name in dict.fromkeys(is_equal.values())}
        plans = sampled(space, remaining, OURS, job.num_plans, job.seed)
        tried = {
            name: Tried(
                plan, space.estimate(plan, bandwidths), space.estimate(plan, default_bandwidths())
            )
            for name, plan in plans.items()
        }
        for name, plan in plans.items():
            save_plan(_file(folder, name), plan)
        actual = [Measured(tried, is_equal, space.size, bandwidths)]
    dist.broadcast_object_list(actual)
    measured: Measured = actual[0]
    for number in range(job.rounds):
        for name in random.Random(number).sample(list(measured.plans), len(measured.plans)):
            gc.collect()
            ticks = _fit(job, {"plan_file": str(_file(folder, name))})
            measured.plans[name].rounds.append(job.turn.times(ticks))
    return measured


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.json"


def _measured(places: NodeLayout) -> AssumedBandwidths:
    """Collective. Return what a fit with bandwidths="measure" would plan with."""
    ranks = job_consensus(60.0).general
    request = bandwidth_request("measure", {})
    return request.with_measured(
        measured_bandwidths(request.to_measure, places, torch.device("cpu"), ranks)
    )


def _chosen(job: Job, folder: Path, planning: dict[str, Any]) -> ShardingPlan:
    """Collective. Return the plan of a fit that plans by itself."""
    _fit(job, planning, limit_train_batches=1, logger=CSVLogger(folder))
    dist.barrier()
    return load_plan(next(folder.rglob(PLAN_FILE)))


def _same(space: Space, named: dict[str, ShardingPlan]) -> dict[str, str]:
    """Return name -> the first name of the same plan."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(space.key(plan), name) for name, plan in named.items()}


def _fit(job: Job, planning: dict[str, Any], **trainer_options: Any) -> list[float]:
    """Collective. Return the seconds at which the steps of a fit began."""
    clock = Clock()
    on_node = job.places.ranks_on_node
    strategy = TorchRecShardedStrategy(
        tables=options(),
        batch_size_per_rank=BATCH_SIZE,
        memory_bytes_per_rank=MEMORY_BYTES,
        planning=planning,
        watchdog_seconds=0,
    )
    trainer = pl.Trainer(**{
        **NO_OUTPUT,
        "strategy": strategy,
        "accelerator": "cpu",
        "devices": on_node,
        "num_nodes": job.places.num_ranks // on_node,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "callbacks": [clock],
        **trainer_options,
    })
    trainer.fit(LitTables(), batches(job.turn.steps, dist.get_rank()))
    return clock.ticks
