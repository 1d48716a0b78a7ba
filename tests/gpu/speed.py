"""Examples per second of Trainer.fit and of a loop by hand with torchrec's TrainPipelineSparseDist,
on one rank."""

import gc
import os
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from tests.benchmarks.performance_contenders import ByHandPrefetched, ByTrainer, our_strategy
from tests.benchmarks.performance_model import Batches
from tests.benchmarks.turns import Turn, silence
from tests.gpu.parts import Found

TABLES, ROWS, DIM = 26, 1_000_000, 128
BATCH_SIZES = (8192, 32768)
ROUNDS = 3


def speed(device: str, small: bool) -> Found:
    """Time both in turns for each batch size; the share of the device's idle time is that of one
    profiled turn."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    silence()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1)
    tables, rows, dim = (3, 1000, 16) if small else (TABLES, ROWS, DIM)
    turn = Turn(2, 4, 3) if small else Turn(10, 30, 3)
    actual = Found()
    for batch_size in (64,) if small else BATCH_SIZES:
        batches = Batches(rows, 2 if small else 8, 0, tables, batch_size)
        times: dict[str, list[float]] = {}
        losses: dict[str, list[float]] = {}
        # One after the other: each holds all tables.
        for name, make in (
            ("by hand", ByHandPrefetched),
            ("ours", partial(ByTrainer, strategy=_strategy)),
        ):
            contender: Any = make(rows, batches, turn, device=torch.device(device), dim=dim)
            contender.clock = clock = Clock(turn, device)
            times[name] = []
            for _ in range(ROUNDS):
                clock.ticks = 0
                times[name].append(sum(contender.turn()) / turn.counted)
            busy, wall = _profiled(contender)
            losses[name] = [float(loss) for loss in contender.losses]
            rate = 1000 * batch_size / statistics.median(times[name])
            actual.numbers[f"{name}, batches of {batch_size}: examples per second"] = rate
            if busy is not None:
                actual.numbers[f"{name}, batches of {batch_size}: idle share"] = 1 - busy / wall
            print(f"{name}, batches of {batch_size}: {rate} examples per second", flush=True)
            del contender
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        ratio = statistics.median(times["ours"]) / statistics.median(times["by hand"])
        actual.numbers[f"batches of {batch_size}: time of a step, ours by by hand"] = ratio
        difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        actual.differences[f"losses, batches of {batch_size}"] = (difference, 1e-4)
    if busy is None:
        actual.notes.append("A CPU has no idle share.")
    return actual


class Clock:
    """Tells the time when a step begins; where the steps that count begin and end, once the device
    is idle."""

    def __init__(self, turn: Turn, device: str) -> None:
        self.ticks = 0
        self._waits = (turn.first, turn.first + turn.counted) if device == "cuda" else ()

    def __call__(self) -> float:
        if self.ticks in self._waits:
            torch.cuda.synchronize()
        self.ticks += 1
        return time.perf_counter()


def _strategy() -> Any:
    return our_strategy(3)


def _profiled(contender: Any) -> tuple[float | None, float]:
    """Return the time of one more turn in which kernels run, and that from its first kernel to its
    last."""
    if ProfilerActivity.CUDA not in supported_activities():
        contender.turn()
        return None, 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as actual:
        contender.turn()
        torch.cuda.synchronize()
    events = [
        e
        for e in actual.events()
        if e.device_type.name == "CUDA" and not e.name.startswith(("Memcpy", "Memset"))
    ]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end = 0.0, spans[0][0]
    for begin, until in spans:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return busy, end - spans[0][0]
