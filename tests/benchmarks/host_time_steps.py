"""What a step costs the main thread of a rank: its processor time, the wall's, and the functions
that it calls."""

import cProfile
import io
import pstats
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from tests.benchmarks.performance_contenders import (
    ByHandPrefetched,
    ByTrainer,
    Clock,
    Contender,
    Turn,
    our_strategy,
)
from tests.benchmarks.performance_model import Batches, as_dict
from tests.benchmarks.performance_rounds import join_ranks, silence
from tests.support.click_model import NO_OUTPUT


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    batch_size: int
    """Examples per rank."""
    num_rows: int
    """Of each table."""
    num_tables: int


@dataclass
class Measured:
    """What rank 0 saw of one contender."""

    thread_times: list[float] = field(default_factory=list)
    """Milliseconds of each step that the main thread ran on a processor."""
    wall_times: list[float] = field(default_factory=list)
    """Milliseconds of each step."""
    functions: Counter[str] = field(default_factory=Counter)
    """`package/file.py:name` -> how often a step called it."""
    builtins: int = 0
    """How often a step called what is not written in Python."""

    @property
    def thread(self) -> float:
        """The median of the main thread's milliseconds."""
        return statistics.median(self.thread_times)

    @property
    def wall(self) -> float:
        """The median of the wall's milliseconds."""
        return statistics.median(self.wall_times)

    def calls_by_package(self, packages: list[str]) -> Counter[str]:
        """Return package -> calls a step, the rest under "others"."""
        actual: Counter[str] = Counter()
        for name, number in self.functions.items():
            package = name.partition("/")[0]
            actual[package if package in packages else "others"] += number
        return actual


class Stopwatch:
    """Notes the main thread's time at each step, too."""

    def __init__(self) -> None:
        self.threads: list[float] = []

    def __call__(self) -> float:
        self.threads.append(time.thread_time())
        return time.perf_counter()


class CallCounter:
    """Counts the functions that a step calls in the main thread: those of Python by name, the
    others together."""

    def __init__(self) -> None:
        self.steps: list[tuple[Counter[str], int]] = []
        self._functions: Counter[Any] = Counter()
        self._builtins = 0

    def __call__(self) -> float:
        sys.setprofile(None)
        named: Counter[str] = Counter()
        for code, number in self._functions.items():
            named[f"{_file(code.co_filename)}:{code.co_name}"] += number
        self.steps.append((named, self._builtins))
        self._functions, self._builtins = Counter(), 0
        sys.setprofile(self._count)
        return time.perf_counter()

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._functions[frame.f_code] += 1
        elif event == "c_call":
            self._builtins += 1

    def usual(self, turn: Turn) -> tuple[Counter[str], int]:
        """Return what most steps in the middle of a turn call: the median of each function's calls,
        and of builtins."""
        steps = self.steps[1:][turn.first : turn.first + turn.counted]
        names = {name for functions, _ in steps for name in functions}
        functions = {
            name: int(statistics.median(step[name] for step, _ in steps)) for name in names
        }
        return Counter({n: k for n, k in functions.items() if k}), int(
            statistics.median(b for _, b in steps)
        )


class FileTimes:
    """Profiles the main thread. A builtin counts to the file that calls it; calls seem dearer than
    they are."""

    def __init__(self, turn: Turn) -> None:
        self._profile = cProfile.Profile(time.thread_time)
        self._turn, self._step = turn, 0

    def __call__(self) -> float:
        if self._step == self._turn.first:
            self._profile.enable()
        elif self._step == self._turn.first + self._turn.counted:
            self._profile.disable()
        self._step += 1
        return time.perf_counter()

    def microseconds(self) -> Counter[str]:
        """Return file -> microseconds of a step."""
        actual: Counter[str] = Counter()
        stats: dict[Any, Any] = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]
        for (path, _, _), (_, _, own_part, _, callers) in stats.items():
            parts = (
                [(path, own_part)]
                if path != "~"
                else [(caller[0], part[2]) for caller, part in callers.items()]
            )
            for entry, seconds in parts:
                actual[_file(entry)] += seconds * 1e6 / self._turn.counted  # type: ignore[assignment]
        return actual


def _file(path: str) -> str:
    """Return a file's path from its package on."""
    for initial in ("site-packages/", "lightning_distrec/"):
        if initial in path:
            inside = path.rpartition(initial)[2]
            return inside if initial == "site-packages/" else initial + inside
    return "python/" + path.rpartition("/")[2]


class _NextToNothing(pl.LightningModule):
    """A module whose steps are Lightning's: one weight, one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.weight * 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class BareLoop:
    """Trainer.fit of next to nothing on one device: what Lightning's loop takes."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, num_rows: int, batches: Batches, turn: Turn) -> None:
        self.batches, self.steps = batches, turn
        self.losses: list[Tensor] = []

    def turn(self) -> list[float]:
        """Fit over all batches."""
        clock = Clock(self.clock)
        strategy = SingleDeviceStrategy(torch.device("cpu"))
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=1, callbacks=[clock], **NO_OUTPUT
        )
        trainer.fit(_NextToNothing(), self.batches.loader(as_dict, self.steps.steps))
        return self.steps.times(clock.ticks)


CONTENDERS: dict[str, Callable[[int, Batches, Turn], Contender]] = {
    "by hand, prefetched": ByHandPrefetched,
    "ours": partial(ByTrainer, strategy=partial(our_strategy, 3)),
    "ours, logged": partial(ByTrainer, strategy=partial(our_strategy, 3), logged=True),
    "Lightning's loop alone": BareLoop,
}
TURN = Turn(first=10, counted=60, last=5)
COUNTED_TURN = Turn(first=24, counted=8, last=5)


def measure(
    sizes: Sizes, rounds: int, names: tuple[str, ...] = tuple(CONTENDERS)
) -> dict[str, Measured]:
    """Collective. Let contenders take turns on this rank, one of those that `run_on_ranks` runs."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        join_ranks()
    silence()
    actual = {name: Measured() for name in names}
    batches = Batches(
        sizes.num_rows, TURN.steps, dist.get_rank(), sizes.num_tables, sizes.batch_size
    )
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contenders = {name: CONTENDERS[name](sizes.num_rows, batches, TURN) for name in names}
        for number in range(rounds):
            for name in random.Random(number).sample(names, len(names)):
                contender, watch = contenders[name], Stopwatch()
                contender.clock = watch
                dist.barrier()
                actual[name].wall_times += contender.turn()
                actual[name].thread_times += TURN.times(watch.threads[: TURN.steps])
        for name, contender in contenders.items():
            actual[name].functions, actual[name].builtins = calls_of(contender)
    return actual


def calls_of(contender: Contender) -> tuple[Counter[str], int]:
    """Collective. Return how often a step calls each function of Python, and builtins; takes a
    turn."""
    counter = CallCounter()
    contender.clock = counter
    contender.steps = COUNTED_TURN
    try:
        contender.turn()
    finally:
        sys.setprofile(None)
    return counter.usual(COUNTED_TURN)


def times_by_file(sizes: Sizes, name: str) -> Counter[str]:
    """Collective. Return how long a step of this contender stays in each file, in microseconds,
    under a profiler."""
    torch.set_num_threads(1)
    join_ranks()
    silence()
    batches = Batches(
        sizes.num_rows, TURN.steps, dist.get_rank(), sizes.num_tables, sizes.batch_size
    )
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contender = CONTENDERS[name](sizes.num_rows, batches, TURN)
        contender.clock = times = FileTimes(TURN)
        contender.turn()
    return times.microseconds()
