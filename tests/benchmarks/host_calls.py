"""What a step calls in the main thread of a rank, and what it takes there: neither is the work of
tables, where these are small."""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist

from tests.benchmarks.performance_contenders import PREFETCHED, ByHandPrefetched, ByTrainer
from tests.benchmarks.performance_model import Batches
from tests.benchmarks.turns import Contender, Turn, in_silence, join_ranks, turns

TURN = Turn(first=10, counted=60, last=5)
COUNTED_TURN = Turn(first=24, counted=8, last=5)


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
    """What rank 0 measured of one contender."""

    thread_times: list[float] = field(default_factory=list)
    """Milliseconds of each step that the main thread ran on a processor."""
    wall_times: list[float] = field(default_factory=list)
    functions: Counter[str] = field(default_factory=Counter)
    """`package/file.py:name` -> how often a step called it."""
    num_builtins: int = 0
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
        """Return package -> calls a step, the remaining ones under "others"."""
        calls: Counter[str] = Counter()
        for name, number in self.functions.items():
            package = name.partition("/")[0]
            calls[package if package in packages else "others"] += number
        return calls


class Stopwatch:
    """Notes the main thread's time at each step, too."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self) -> float:
        self.ticks.append(time.thread_time())
        return time.perf_counter()


class CallCounter:
    """Counts the functions that a step calls in the main thread: those of Python by name, the
    others together."""

    def __init__(self) -> None:
        self.steps: list[tuple[Counter[str], int]] = []
        self._functions: Counter[Any] = Counter()
        self._num_builtins = 0

    def __call__(self) -> float:
        sys.setprofile(None)
        named: Counter[str] = Counter()
        for code, number in self._functions.items():
            named[f"{_path_in_package(code.co_filename)}:{code.co_name}"] += number
        self.steps.append((named, self._num_builtins))
        self._functions, self._num_builtins = Counter(), 0
        sys.setprofile(self._count)
        return time.perf_counter()

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._functions[frame.f_code] += 1
        elif event == "c_call":
            self._num_builtins += 1

    def medians(self, turn: Turn) -> tuple[Counter[str], int]:
        """Return the median of each function's calls, and of builtins, in the steps that count."""
        steps = self.steps[1:][turn.first : turn.first + turn.counted]
        names = {name for functions, _ in steps for name in functions}
        calls: Counter[str] = Counter()
        for name in names:
            number = int(statistics.median(functions[name] for functions, _ in steps))
            if number:
                calls[name] = number
        return calls, int(statistics.median(num_builtins for _, num_builtins in steps))


def _path_in_package(path: str) -> str:
    """Return a file's path from its package on."""
    if "site-packages/" in path:
        return path.rpartition("site-packages/")[2]
    if "lightning_distrec/" in path:
        return "lightning_distrec/" + path.rpartition("lightning_distrec/")[2]
    return "python/" + path.rpartition("/")[2]


HAND = "by hand, prefetched"
CONTENDERS: dict[str, Callable[[int, Batches, Turn], Contender]] = {
    HAND: ByHandPrefetched,
    "ours": partial(ByTrainer, strategy=PREFETCHED),
    "ours, logged": partial(ByTrainer, strategy=PREFETCHED, logged=True),
}


def measure(sizes: Sizes, rounds: int) -> dict[str, Measured]:
    """Collective. Let contenders take turns on this rank."""
    join_ranks()
    drawn = (sizes.num_rows, TURN.steps, dist.get_rank(), sizes.num_tables, sizes.batch_size)
    batches = Batches(*drawn)
    measured = {name: Measured() for name in CONTENDERS}
    with in_silence():
        contenders = {}
        for name, make in CONTENDERS.items():
            contenders[name] = make(sizes.num_rows, batches, TURN)
        for name in turns(list(CONTENDERS), rounds):
            contender, watch = contenders[name], Stopwatch()
            contender.clock = watch
            dist.barrier()
            measured[name].wall_times += contender.turn()
            measured[name].thread_times += TURN.times(watch.ticks[: TURN.steps])
        for name, contender in contenders.items():
            calls, num_builtins = calls_of(contender)
            measured[name].functions, measured[name].num_builtins = calls, num_builtins
    return measured


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
    return counter.medians(COUNTED_TURN)
