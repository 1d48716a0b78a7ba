"""Saves in turns, ours, a bare dcp.save and plain DDP's: each from the same machine, with peaks of
memory."""

import ctypes
import gc
import io
import os
import random
import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_distrec.checkpoint.atomic_folder import is_checkpoint
from tests.benchmarks.checkpointing_model import (
    SavedDLRM,
    endless_loader,
    fill,
    local_shards,
    must_be_saved,
    sharded_tensors,
)
from tests.benchmarks.performance_rounds import silence
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

COMPRESSING = ("btrfs", "zfs", "bcachefs", "f2fs")
"""File systems that may write zeros faster than anything else."""


def all_gather(value: Any) -> list[Any]:
    """Collective. Return every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(action: Callable[[], Any]) -> float:
    """Collective. Run `action` on all ranks at once; returns the seconds that the slowest of them
    needed."""
    dist.barrier()
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    del result  # giving memory back is no part of it
    return max(all_gather(seconds))


def make_ready(*folders: Path) -> None:
    """Collective. Remove folders and wait until nothing is left to be written, so that turns do not
    pay for each other.

    A machine's memory is fastest where it was used just before: so folders are removed right before
    a turn, not after one, which leaves the same memory for every turn.
    """
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()


def forget_freed_memory() -> None:
    """Give what this process has freed back to the kernel: copies then pay for their memory, and
    peaks show it."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # only glibc has it


def write_plainly(folder: Path, count: int) -> None:
    """Write `count` bytes with dd, and wait until they are on disk."""
    folder.mkdir(exist_ok=True)
    run = [
        "dd",
        f"if={source_of_bytes(folder, count)}",
        f"of={folder}/{dist.get_rank()}.dd",
        "bs=1M",
        "conv=fsync",
    ]
    subprocess.run([*run, f"count={count // 2**20}", "status=none"], check=True)


def source_of_bytes(folder: Path, count: int) -> Path:
    """Return what dd reads: zeros, or a file of random bytes, made once, where the file system may
    compress."""
    if file_system(folder) not in COMPRESSING:
        return Path("/dev/zero")
    source = folder.parent / f"random-{dist.get_rank()}"
    if not source.exists():
        with open(source, "wb") as file:
            for _ in range(count // 2**20):
                file.write(os.urandom(2**20))
    return source


def file_system(path: Path) -> str:
    """Return the type of the file system that a folder is on."""
    best, kind = "", "unknown"
    with open("/proc/mounts") as file:
        for line in file:
            mount_point, type_values = line.split()[1:3]
            inside = path.resolve().is_relative_to(mount_point)
            if inside and len(mount_point) >= len(best):
                best, kind = mount_point, type_values
    return kind


class Peak:
    """By how many bytes this process was larger, at its largest, than when the measurement began.

    It is VmHWM, which the kernel keeps and forgets on demand, and not samples of RssAnon: no short
    peak is missed, and no thread looks on while others are timed. It counts mapped files, too; none
    of what is measured maps large ones.
    """

    def __init__(self) -> None:
        forget_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def bytes(self) -> int:
        """Return the growth so far."""
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:"))


def folder_bytes(path: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


QUIET_STEPS = 20
"""Steps between two saves that are compared with those during one."""


@dataclass(frozen=True)
class Job:
    """What is saved, where and how often. The first round, which warms up, does not count."""

    folder: Path
    num_rows: int
    rounds: int

    @property
    def ours(self) -> Path:
        """Our checkpoint."""
        return self.folder / "ours.ckpt"

    @property
    def bare(self) -> Path:
        """That of torch.distributed.checkpoint."""
        return self.folder / "bare"

    @property
    def plain(self) -> Path:
        """What dd writes."""
        return self.folder / "dd"


@dataclass
class Saves:
    """Seconds of each round, the slowest rank's, by contender; bytes."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: int = 0
    """By how much the largest rank grew while it saved."""
    folder: int = 0
    tensors: int = 0
    """All bytes of the tensors that are in the folder."""
    seed: int = 0
    """Of what the folders hold at the end."""


@dataclass
class AsyncSaves:
    """Seconds of each round, the slowest rank's; bytes of a rank."""

    clone: list[float] = field(default_factory=list)
    """A copy of the shards in fresh memory."""
    copy: list[float] = field(default_factory=list)
    """... in memory that is there already."""
    stall: list[float] = field(default_factory=list)
    """Until save_checkpoint returns."""
    whole: list[float] = field(default_factory=list)
    """Until the checkpoint is complete."""
    quiet_step: list[float] = field(default_factory=list)
    """The median step while nothing is written, and while something is."""
    writing_step: list[float] = field(default_factory=list)
    peak: int = 0
    """By how much the largest rank grew until the checkpoint was complete."""
    shards: int = 0


class AfterFirstStep(pl.Callback):
    """Calls `action` when a step has been made, and lets the fit end."""

    def __init__(self, action: Callable[[pl.Trainer], None]) -> None:
        self.action = action

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.action(trainer)
        trainer.should_stop = True


def saves(job: Job) -> Saves:
    """Collective. Save round after round on this rank, one of those that `run_on_ranks` runs."""
    actual = Saves()
    _fit(job, AfterFirstStep(partial(_save_in_turns, job, actual)))
    return actual


def _fit(job: Job, callback: pl.Callback, **checkpoint: Any) -> None:
    silence()
    trainer = make_trainer(
        {"sharding_types": ["table_wise"], "checkpoint": checkpoint}, callbacks=[callback]
    )
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(SavedDLRM(job.num_rows), endless_loader(job.num_rows, rank_and_num_ranks()[0]))


def _save_in_turns(job: Job, actual: Saves, trainer: pl.Trainer) -> None:
    tensors = sharded_tensors(trainer)
    local_bytes = sum(shard.nbytes for shard in local_shards(tensors))
    actual.tensors = sum(all_gather(local_bytes))
    contenders: dict[str, tuple[Path, Callable[[], Any]]] = {
        "ours": (job.ours, lambda: trainer.save_checkpoint(job.ours)),
        "bare": (job.bare, lambda: save_barely(job.bare, tensors)),
        "dd": (job.plain, lambda: write_plainly(job.plain, local_bytes)),
    }
    actual.seconds = {name: [] for name in contenders}
    for actual.seed in range(1 + job.rounds):
        fill(tensors, actual.seed)
        for name in random.Random(actual.seed).sample(list(contenders), len(contenders)):
            path, action = contenders[name]
            make_ready(path)
            peak = Peak()
            seconds = slowest(action)
            actual.peak = (
                max([actual.peak, *all_gather(peak.bytes())]) if name == "ours" else actual.peak
            )
            if actual.seed:
                actual.seconds[name].append(seconds)
        must_be_saved(job.ours, actual.seed, trainer.global_rank, trainer.world_size)
    actual.folder = folder_bytes(job.ours)
    make_ready(job.plain)


def save_barely(path: Path, tensors: dict[str, Any]) -> None:
    """Collective. Save as one does with torch alone, its writer as it is by default."""
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path))


def async_saves(job: Job) -> AsyncSaves:
    """Collective. Save behind training, round after round, on this rank."""
    actual = AsyncSaves()
    _fit(job, _SavesWhileTraining(job, actual), async_save=True)
    return actual


class _SavesWhileTraining(pl.Callback):
    """Trains a few steps, saves, trains on until the checkpoint is complete, and begins again."""

    def __init__(self, job: Job, actual: AsyncSaves) -> None:
        self.job, self.found = job, actual
        self.round = 0
        self.buffers: list[Tensor] = []
        self.tensors: dict[str, Any] = {}
        self.tick: float | None = None
        """When the step before this began; None where something else lies between."""
        self.steps: list[float] = []
        self.quiet_step = 0.0
        self.began: float | None = None
        """When the save that is under way was begun."""
        self.peak: Peak | None = None
        self.times: dict[str, float] = {}
        self.path = job.ours

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.tensors = sharded_tensors(trainer)
        shards = local_shards(self.tensors)
        self.found.shards = sum(shard.nbytes for shard in shards)
        self.buffers = [torch.zeros_like(shard).fill_(1) for shard in shards]

    def on_train_batch_start(self, *_: Any) -> None:
        current = time.perf_counter()
        if self.tick is not None:
            self.steps.append(current - self.tick)
        self.tick = current

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        is_complete = torch.tensor([float(self.began is not None and is_checkpoint(self.path))])
        dist.broadcast(is_complete, 0)  # in every step alike
        if self.began is None and len(self.steps) >= QUIET_STEPS:
            self._begin(trainer)
        elif self.began is not None and is_complete.item():
            self._end(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        """Collective. Copy, in every other round, and begin to save."""
        self.quiet_step = median(self.steps[2:])
        fill(self.tensors, self.round)
        if self.round % 2:
            self._copies()
        make_ready()
        self._warm_memory()
        self.peak = Peak()
        self.began = time.perf_counter()
        self.times["stall"] = slowest(lambda: trainer.save_checkpoint(self.path))
        self.steps, self.tick = [], None

    def _end(self, trainer: pl.Trainer) -> None:
        """Collective. Look at what was saved, copy in the other rounds, and begin anew."""
        assert self.began is not None
        assert self.peak is not None
        self.times["whole"] = max(all_gather(time.perf_counter() - self.began))
        writing_step = median(self.steps) if self.steps else self.quiet_step
        self.found.peak = max([self.found.peak, *all_gather(self.peak.bytes())])
        must_be_saved(self.path, self.round, trainer.global_rank, trainer.world_size)
        make_ready(self.path)
        if not self.round % 2:
            self._copies()
        if self.round:
            for name, seconds in self.times.items():
                getattr(self.found, name).append(seconds)
            self.found.quiet_step.append(self.quiet_step)
            self.found.writing_step.append(writing_step)
        self.round += 1
        self.path = self.job.folder / f"async-{self.round}.ckpt"
        self.began, self.steps, self.tick = None, [], None
        trainer.should_stop = self.round > self.job.rounds

    def _copies(self) -> None:
        """Collective. Time one copy of this rank's shards."""
        shards = local_shards(self.tensors)
        make_ready()
        self._warm_memory()
        self.times["clone"] = slowest(lambda: [shard.clone() for shard in shards])
        self.times["copy"] = slowest(
            lambda: [b.copy_(s) for b, s in zip(self.buffers, shards, strict=True)]
        )

    def _warm_memory(self) -> None:
        """Use as much memory as a copy and its file take, and give it back: a hypervisor may be
        slow to bring it."""
        clones = [shard.clone() for shard in 2 * local_shards(self.tensors)]
        del clones
        forget_freed_memory()
