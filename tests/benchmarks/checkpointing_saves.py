"""Saves and loads in turns, ours and torch's own, each from the same state of the machine, with
peaks of memory."""

import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
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
    must_hold,
    sharded_tensors,
)
from tests.benchmarks.turns import gathered, in_silence, slowest, turns
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

OURS, BARE, PLAIN = "save", "bare `dcp.save`", "`dd`, one of each rank at once"
STALL, WHOLE = "async save: stall", "async save: until it is complete"
CLONE = "one copy in fresh memory"
QUIET, WRITING = "a step", "a step meanwhile"
QUIET_STEPS = 20
"""Steps between two saves that are compared with those during one."""
CUTS = {1: "table_wise", 3: "row_wise"}
"""Number of ranks that load -> how the tables are cut there."""
NOT_SAVED = -1
"""A seed."""


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


@dataclass
class Measured:
    """What was measured, by name."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each round, the slowest rank's."""
    num_bytes: dict[str, int] = field(default_factory=dict)
    """By how much the largest rank grew, and sizes of what is saved."""

    def note_peak(self, name: str, peak: "Peak") -> None:
        """Collective. Keep the growth of the rank that grew most."""
        self.num_bytes[name] = max(self.num_bytes.get(name, 0), *gathered(peak.growth()))


class Peak:
    """By how many bytes this process was larger, at its largest, than when the measurement began.

    It is VmHWM, which the kernel keeps and forgets on demand, and not samples of RssAnon: no short
    peak is missed, and no thread looks on while others are timed. It counts mapped files, too; none
    of what is measured maps large ones.
    """

    def __init__(self) -> None:
        forget_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")
        self._initial = _status("VmRSS")

    def growth(self) -> int:
        """Return the growth so far, in bytes."""
        return max(0, _status("VmHWM") - self._initial)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def forget_freed_memory() -> None:
    """Give what this process has freed back to the kernel: copies then pay for their memory, and
    peaks show it."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # only glibc has it


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


def folder_bytes(path: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


class AfterFirstStep(pl.Callback):
    """Calls `action` when a step has been made, and lets the fit end."""

    def __init__(self, action: Callable[[pl.Trainer], None]) -> None:
        self.action = action

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.action(trainer)
        trainer.should_stop = True


def _fit(job: Job, callback: pl.Callback, cut: str, path: Path | None = None, **saves: Any) -> None:
    strategy = {"sharding_types": [cut], "checkpoint": {"distributed": True} | saves}
    with in_silence():
        loader = endless_loader(job.num_rows, rank_and_num_ranks()[0])
        trainer = make_trainer(strategy, callbacks=[callback])
        trainer.fit(SavedDLRM(job.num_rows), loader, ckpt_path=path)


def saves(job: Job) -> Measured:
    """Collective. Save round after round on this rank. The folders keep what seed `job.rounds`
    draws."""
    measured = Measured()
    callback = AfterFirstStep(lambda trainer: _save_in_turns(job, measured, trainer))
    _fit(job, callback, "table_wise")
    return measured


def _save_in_turns(job: Job, measured: Measured, trainer: pl.Trainer) -> None:
    tensors = sharded_tensors(trainer)
    local_bytes = sum(shard.nbytes for shard in local_shards(tensors))
    plain = job.folder / "dd"
    contenders: dict[str, tuple[Path, Callable[[], Any]]] = {
        OURS: (job.ours, lambda: trainer.save_checkpoint(job.ours)),
        BARE: (job.bare, lambda: save_barely(job.bare, tensors)),
        PLAIN: (plain, lambda: write_plainly(plain, local_bytes)),
    }
    for number, name in enumerate(turns(list(contenders), 1 + job.rounds)):
        seed = number // len(contenders)
        fill(tensors, seed)
        path, action = contenders[name]
        make_ready(path)
        peak = Peak()
        seconds = slowest(action)
        if name == OURS:
            measured.note_peak(name, peak)
            must_be_saved(job.ours, seed, trainer.global_rank, trainer.world_size)
        if seed:
            measured.seconds[name].append(seconds)
    measured.num_bytes["tensors"] = sum(gathered(local_bytes))
    measured.num_bytes["folder"] = folder_bytes(job.ours)
    make_ready(plain)


def save_barely(path: Path, tensors: dict[str, Any]) -> None:
    """Collective. Save as one does with torch alone, its writer as it is by default."""
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path))


def write_plainly(folder: Path, num_bytes: int) -> None:
    """Write zeros with dd, and wait until they are on disk."""
    folder.mkdir(exist_ok=True)
    file = f"of={folder}/{dist.get_rank()}.dd"
    command = ["dd", "if=/dev/zero", file, "bs=1M", "conv=fsync", "status=none"]
    subprocess.run([*command, f"count={num_bytes // 2**20}"], check=True)


def async_saves(job: Job) -> Measured:
    """Collective. Save behind training, round after round, on this rank."""
    callback = SavesWhileTraining(job)
    _fit(job, callback, "table_wise", async_save=True)
    return callback.measured


class SavesWhileTraining(pl.Callback):
    """Trains a few steps, saves, trains on until the checkpoint is complete, copies, and begins
    again."""

    def __init__(self, job: Job) -> None:
        self.job, self.measured = job, Measured()
        self.round = 0
        self.tensors: dict[str, Any] = {}
        self.tick: float | None = None
        """When the step before this began; None where something else lies between."""
        self.steps: list[float] = []
        self.began: float | None = None
        """When the save that is under way was begun."""
        self.peak: Peak | None = None
        self.seconds: dict[str, float] = {}
        self.path = job.ours

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.tensors = sharded_tensors(trainer)
        shards = local_shards(self.tensors)
        self.measured.num_bytes["shards"] = sum(shard.nbytes for shard in shards)

    def on_train_batch_start(self, *_: Any) -> None:
        current = time.perf_counter()
        if self.tick is not None:
            self.steps.append(current - self.tick)
        self.tick = current

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        is_complete = self.began is not None and is_checkpoint(self.path)
        agreed = torch.tensor([float(is_complete)])
        dist.broadcast(agreed, 0)  # in every step alike
        if self.began is None and len(self.steps) >= QUIET_STEPS:
            self._begin(trainer)
        elif self.began is not None and agreed.item():
            self._end(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        """Collective. Begin to save."""
        self.seconds[QUIET] = statistics.median(self.steps[2:])
        fill(self.tensors, self.round)
        make_ready()
        self._warm_memory()
        self.peak = Peak()
        self.began = time.perf_counter()
        self.seconds[STALL] = slowest(lambda: trainer.save_checkpoint(self.path))
        self.steps, self.tick = [], None

    def _end(self, trainer: pl.Trainer) -> None:
        """Collective. Look at what was saved, time one copy of the shards, and begin anew."""
        assert self.began is not None
        assert self.peak is not None
        self.seconds[WHOLE] = max(gathered(time.perf_counter() - self.began))
        self.seconds[WRITING] = statistics.median(self.steps or [self.seconds[QUIET]])
        self.measured.note_peak(STALL, self.peak)
        must_be_saved(self.path, self.round, trainer.global_rank, trainer.world_size)
        make_ready(self.path)
        self._warm_memory()
        self.seconds[CLONE] = slowest(self._clone)
        if self.round:
            for name, seconds in self.seconds.items():
                self.measured.seconds[name].append(seconds)
        self.round += 1
        self.path = self.job.folder / f"async-{self.round}.ckpt"
        self.began, self.steps, self.tick = None, [], None
        trainer.should_stop = self.round > self.job.rounds

    def _clone(self) -> list[Tensor]:
        return [shard.clone() for shard in local_shards(self.tensors)]

    def _warm_memory(self) -> None:
        """Use as much memory as a copy and its file take, and give it back: a hypervisor may be
        slow to bring it."""
        clones = [self._clone(), self._clone()]
        del clones
        forget_freed_memory()


def loads(job: Job) -> Measured:
    """Collective. Resume on this rank, and load again round after round: ours, and by torch
    alone."""
    num_ranks, measured = rank_and_num_ranks()[1], Measured()
    callback = AfterFirstStep(lambda trainer: _load_in_turns(job, measured, trainer))
    _fit(job, callback, CUTS[num_ranks], job.ours)
    return measured


def _load_in_turns(job: Job, measured: Measured, trainer: pl.Trainer) -> None:
    tensors, name = sharded_tensors(trainer), f"load on {trainer.world_size}"
    contenders: dict[str, Callable[[], Any]] = {
        name: lambda: load_as_lightning_does(trainer, job.ours),
        f"bare `dcp.load` on {trainer.world_size}": lambda: load_barely(job.bare, tensors),
    }
    for number, contender in enumerate(turns(list(contenders), 1 + job.rounds)):
        fill(tensors, NOT_SAVED)
        peak = Peak()
        seconds = slowest(contenders[contender])
        if contender == name:
            measured.note_peak(name, peak)
        must_hold(tensors, job.rounds, contender)
        if number >= len(contenders):
            measured.seconds[contender].append(seconds)


def load_as_lightning_does(trainer: pl.Trainer, path: Path) -> None:
    """Collective. Call the strategy's three methods that `trainer.fit(ckpt_path=path)` loads by."""
    checkpoint = trainer.strategy.load_checkpoint(path)
    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    trainer.strategy.load_optimizer_state_dict(checkpoint)


def load_barely(path: Path, tensors: dict[str, Any]) -> None:
    """Collective. Load as one does with torch alone."""
    dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path))
