"""Contenders take turns in one process group, in another order in every round, so that all see the
same machine."""

import cProfile
import gc
import io
import logging
import random
import statistics
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from lightning_distrec._compat.gloo import one_socket_thread
from tests.benchmarks.performance_contenders import CONTENDERS, Contender, Turn
from tests.benchmarks.performance_delay import every_exchange_takes
from tests.benchmarks.performance_model import Batches
from tests.support.ranks import rank_and_num_ranks


class CannotMeasure(RuntimeError):
    """What is asked for cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Job:
    """What is timed, and how often."""

    contenders: tuple[str, ...]
    rounds: int
    num_rows: int = 100_000
    turn: Turn = field(default_factory=Turn)
    turns: tuple[tuple[str, Turn], ...] = ()
    """Contenders with turns of another length."""
    delay_milliseconds: float = 0.0
    """What every all-to-all takes at least."""

    profiles: str = ""
    """Folder for a profile of one further turn of each contender on rank 0; "" for none."""

    def turn_of(self, contender: str) -> Turn:
        """Return the steps of a contender's turn."""
        return dict(self.turns).get(contender, self.turn)


@dataclass
class Timed:
    """What rank 0 saw of one contender."""

    rounds: list[list[float]] = field(default_factory=list)
    """Milliseconds of the steps of each turn."""
    losses: list[float] = field(default_factory=list)
    exchanges: float = 0.0
    """All-to-alls that were started in a step."""
    messages: set[str] = field(default_factory=set)
    """Warnings that speak of prefetching: one of them may say why there was none."""

    @property
    def milliseconds(self) -> float:
        """The median of all steps of all rounds."""
        return statistics.median(step for steps in self.rounds for step in steps)


Times = dict[str, Timed]


def join_ranks() -> None:
    """Collective. Start the process group that all contenders share, by the environment, as a
    Trainer does."""
    rank, num_ranks = rank_and_num_ranks()
    with one_socket_thread():  # to the loops by hand, which have one group, it makes no difference
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)


def take_turns(job: Job) -> Times:
    """Collective. Run all rounds on this rank, one of those that `run_on_ranks` runs; returns what
    was timed."""
    if not dist.is_initialized():
        join_ranks()
    silence()
    times = {name: Timed() for name in job.contenders}
    most = max(job.turn_of(name).steps for name in job.contenders)
    batches = Batches(job.num_rows, most, dist.get_rank())
    with redirect_stdout(io.StringIO()), every_exchange_takes(job.delay_milliseconds) as exchanges:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contenders = {
                name: CONTENDERS[name](job.num_rows, batches, job.turn_of(name))
                for name in job.contenders
            }
        for number in range(job.rounds):
            for name in random.Random(number).sample(job.contenders, len(job.contenders)):
                gc.collect()
                initial = exchanges.started
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    times[name].rounds.append(contenders[name].turn())
                times[name].exchanges = (exchanges.started - initial) / job.turn_of(name).steps
                times[name].messages |= {
                    text for w in caught if "prefetch" in (text := str(w.message))
                }
        for name, contender in contenders.items():
            times[name].losses = [float(loss) for loss in contender.losses]
            if job.profiles:
                _profile(
                    contender,
                    Path(job.profiles) / f"{name.replace(', ', '_').replace(' ', '_')}.prof",
                )
    return times


def _profile(contender: Contender, path: Path) -> None:
    """Collective. Let it take one more turn under cProfile, which sees the main thread only: not
    backward's."""
    with cProfile.Profile() as profile:
        contender.turn()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(path)


def silence() -> None:
    """Let libraries say nothing but errors on this rank."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def ratio(times: Times, above: str, below: str) -> tuple[float, list[float]]:
    """Return the ratio of two contenders' medians over all rounds, and that of each round that both
    had."""
    medians = [
        [statistics.median(steps) for steps in times[name].rounds] for name in (above, below)
    ]
    return times[above].milliseconds / times[below].milliseconds, [
        a / b for a, b in zip(*medians, strict=False)
    ]


def difference(times: Times, first: str, other: str) -> float:
    """Return the largest difference of two contenders' losses at any step."""
    pairs = zip(times[first].losses, times[other].losses, strict=True)
    return max(abs(a - b) for a, b in pairs)
