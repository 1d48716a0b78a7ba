"""Contenders take turns in one process group, in another order in every round, so that all see the
same machine."""

import gc
import io
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import rank_and_num_ranks


@dataclass(frozen=True)
class Turn:
    """The steps of one turn, of which those in the middle count."""

    first: int = 5
    """Steps until caches are warm."""
    counted: int = 25
    last: int = 3
    """Steps at the end, where prefetching has no further batch to fetch."""

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.first + self.counted + self.last

    def times(self, ticks: list[float]) -> list[float]:
        """Return the milliseconds of the steps that count. ticks: seconds at the beginning of every
        step."""
        assert len(ticks) == self.steps, (len(ticks), self)
        milliseconds = [1000 * (end - begin) for begin, end in pairwise(ticks)]
        return milliseconds[self.first : self.first + self.counted]


class Clock(pl.Callback):
    """Notes when each step begins."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.ticks: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note it."""
        self.ticks.append(self.clock())

    on_validation_batch_start = on_train_batch_start


class Contender(Protocol):
    """One way to train the model. `losses`: those of all steps so far, on this rank."""

    clock: Callable[[], float]
    """Called when a step begins; returns seconds."""
    steps: Turn
    """Of each turn."""

    @property
    def losses(self) -> list[Tensor]: ...

    def turn(self) -> list[float]:
        """Collective. Train over all batches once more; returns the milliseconds of each step that
        counts."""


@dataclass
class Timed:
    """What rank 0 measured of one contender."""

    rounds: list[list[float]] = field(default_factory=list)
    """Milliseconds of the steps of each turn."""
    losses: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """The median of all steps of all rounds."""
        return statistics.median(self.steps())

    @property
    def lower_quartile(self) -> float:
        """The time that a quarter of all steps do not exceed: other load on the machine only
        adds."""
        return statistics.quantiles(self.steps(), n=4, method="inclusive")[0]

    def steps(self) -> list[float]:
        """Return the steps of all rounds."""
        return [step for steps in self.rounds for step in steps]

    def medians(self) -> list[float]:
        """Return the median of each round."""
        return [statistics.median(steps) for steps in self.rounds]


Times = dict[str, Timed]


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield whose turn it is, in an order that is the same on all ranks."""
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            gc.collect()
            yield name


def time_contenders(contenders: dict[str, Contender], rounds: int) -> Times:
    """Collective. Let all take their turns."""
    times = {name: Timed() for name in contenders}
    for name in turns(list(contenders), rounds):
        times[name].rounds.append(contenders[name].turn())
    for name, contender in contenders.items():
        times[name].losses = [float(loss) for loss in contender.losses]
    return times


def join_ranks() -> None:
    """Collective. Start the process group that all contenders share, by the environment, unless
    there is one."""
    torch.set_num_threads(1)
    if dist.is_initialized():
        return
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)


def silence() -> None:
    """Let libraries say nothing but errors on this rank."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def in_silence() -> Iterator[None]:
    """Print and warn of nothing inside of the context."""
    silence()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gathered(value: Any) -> list[Any]:
    """Collective. Return every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(action: Callable[[], Any]) -> float:
    """Collective. Run `action` on all ranks at once; returns the seconds of the slowest of them."""
    dist.barrier()
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    del result  # giving memory back is no part of it
    return max(gathered(seconds))


def difference(times: Times, first: str, other: str) -> float:
    """Return the largest difference of two contenders' losses at any step."""
    pairs = zip(times[first].losses, times[other].losses, strict=True)
    return max(abs(loss - expected) for loss, expected in pairs)
