"""Saves checkpoints, at once or in a thread; and says which ones threads of this process are
writing."""

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar

from lightning_distrec.atomic_files import UNLIMITED, Pace, write_file
from lightning_distrec.checkpoint.atomic_folder import (
    CHECKSUMS,
    UnfinishedFolder,
    clean_up,
    is_checkpoint,
    remove,
)
from lightning_distrec.checkpoint.checksums import checksums_of
from lightning_distrec.checkpoint.host_copies import copy_to_host
from lightning_distrec.checkpoint.plain_state import extract_tensors, large_tensors, to_bytes
from lightning_distrec.checkpoint.tensor_files import write_tensors
from lightning_distrec.chunks import ChunkedTensor
from lightning_distrec.errors import CheckpointError
from lightning_distrec.host_memory import release_free_memory
from lightning_distrec.ranks import Ranks
from lightning_distrec.units import format_bytes

# Of the process, not of one Saver: loggers know a checkpoint's path, and not the strategy that
# writes it.
writing: dict[Path, Thread] = {}


def wait_for_checkpoint(path: Path) -> bool:
    """Return whether there is a complete checkpoint, a file or a folder; where one is being
    written, once it is."""
    thread = writing.get(path.absolute())
    if thread is not None:
        thread.join()
    # A write that failed ends its thread as well, so the disk is asked in any case.
    return is_checkpoint(path)


T = TypeVar("T")

MAX_NICENESS = 19
WRITER_NICENESS = 10
"""By how much a thread that writes yields to steps: a tenth of a core that both need (sched(7)), so
that it ends."""

STATE_FILE = "state.pt"
PLAN_FILE = "plan.json"
"""Name of the file with the sharding plan; not there without tables."""


def rank_file(rank: int) -> str:
    """Return the name of the file with what only this rank has."""
    return f"rank_{rank}.pt"


class Snapshot(Protocol):
    """What a rank writes of a checkpoint, of whichever form."""

    @property
    def path(self) -> Path:
        """The checkpoint's path."""

    def on_host(self) -> "Snapshot":
        """Return a copy whose tensors share no memory with the module and its optimizers."""

    def write(self, ranks: Ranks, pace: Pace = UNLIMITED) -> None:
        """Collective. Write it; until it is complete, or if a rank fails and all raise, what was
        there stays."""


@dataclass(frozen=True, kw_only=True)
class RankContent:
    """What one rank has of a checkpoint that is to be written, before its form is chosen."""

    path: Path
    checkpoint: Mapping[str, Any]
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """What only this rank has."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the marker says besides; in JSON's types."""
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> content of files that loading does not need; those of rank 0 are written."""
    pickles: bool = False
    """Whether `checkpoint` may hold any types."""


@dataclass(frozen=True)
class FolderSnapshot:
    """What one rank writes of a folder."""

    path: Path
    tensors: Mapping[str, ChunkedTensor]
    files: Mapping[str, bytes]
    """Name -> content of what is no tensor."""
    marker: dict[str, Any]

    def on_host(self) -> "FolderSnapshot":
        """Return a copy whose tensors share no memory with the module and its optimizers."""
        return replace(self, tensors=copy_to_host(self.tensors))

    def write(self, ranks: Ranks, pace: Pace = UNLIMITED) -> None:
        """Collective. Write the folder."""

        def write_files() -> dict[str, list[int]]:
            checksums = write_tensors(folder, self.tensors, ranks.rank, pace)
            for name, content in self.files.items():
                write_file(folder / name, content)
                checksums[name] = checksums_of(content)
            return checksums

        def complete() -> None:
            if unfinished is not None:
                checksums = dict(ChainMap(*per_rank_checksums))
                unfinished.complete({**self.marker, CHECKSUMS: checksums})

        # Each part ends with an agreement: a rank that cannot write makes all ranks raise, and none
        # is left in a collective that it never reaches.
        with unfinished_on_rank_0(ranks, self.path) as unfinished:
            name = unfinished.path.name if unfinished is not None else ""
            # Rank 0 draws the name, and the others must see the folder: it may be on a disk of rank
            # 0 alone.
            folder = self.path.parent / ranks.all_gather(name)[0]
            on_all_ranks(ranks, self.path, lambda: _must_see(folder))
            checksums = on_all_ranks(ranks, self.path, write_files)
            per_rank_checksums = ranks.all_gather(checksums)
            on_all_ranks(ranks, self.path, complete)


def take_folder_snapshot(content: RankContent, ranks: Ranks) -> FolderSnapshot:
    """Collective. Return what this rank writes. Raises CheckpointError on every rank: something is
    no plain type."""
    checkpoint = content.checkpoint
    pickles = content.pickles
    # A tensor that only some ranks hold, or that differs in shape, cannot be divided among all for
    # writing.
    per_rank_tensors = list(map(set, ranks.all_gather(large_tensors(checkpoint))))
    on_all = {path for path, _, _ in set.intersection(*per_rank_tensors)}
    plain, tensors = extract_tensors(checkpoint, on_all, ranks.rank, ranks.num_ranks, pickles)
    marker = {"num_ranks": ranks.num_ranks, **content.facts}
    for key in ("epoch", "global_step"):
        if key in checkpoint:
            marker.setdefault(key, checkpoint[key])

    def to_files() -> dict[str, bytes]:
        files = {rank_file(ranks.rank): to_bytes(dict(content.rank_state))}
        if ranks.rank == 0:
            files |= {STATE_FILE: to_bytes(plain, pickles), **content.extra_files}
        return files

    # Into bytes now: training may change these values while a thread writes them. A value of no
    # plain type stops all ranks before any of them makes a file.
    files = ranks.all_or_none("saving a checkpoint", to_files)
    return FolderSnapshot(content.path, tensors, files, marker)


@contextlib.contextmanager
def unfinished_on_rank_0(ranks: Ranks, path: Path) -> Iterator[UnfinishedFolder | None]:
    """Collective. Yield a folder to write a checkpoint in, on rank 0; it is gone afterwards if it
    is not completed."""

    def begin() -> UnfinishedFolder | None:
        if ranks.rank:
            return None
        # What writers left that have died goes first: this checkpoint may need its disk space.
        clean_up(path.parent)
        return UnfinishedFolder(path)

    folder = on_all_ranks(ranks, path, begin)
    try:
        yield folder
    finally:
        if folder is not None:
            # After `complete` there is nothing of this name left, and nothing is removed.
            folder.abandon()


def _must_see(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank 0 made the folder {folder}, which this rank does not see. Set default_root_dir, "
            "or the dirpath of ModelCheckpoint, to a folder that all ranks share."
        )


def on_all_ranks(ranks: Ranks, path: Path, action: Callable[[], T]) -> T:
    """Collective. Run a part of writing on every rank. Raises CheckpointError on all: it has failed
    on one of them."""

    def checked() -> T:
        try:
            return action()
        except OSError as error:
            existing = next(folder for folder in path.absolute().parents if folder.exists())
            free = format_bytes(shutil.disk_usage(existing).free)
            raise CheckpointError(
                f"the checkpoint {path} cannot be written: {error}. {free} are free there. Earlier "
                "checkpoints are unchanged."
            ) from error

    return ranks.all_or_none("saving a checkpoint", checked)


class Saver:
    """Saves one checkpoint after the other; in a thread if `is_async`, at most one at a time."""

    def __init__(
        self,
        ranks: Ranks,
        is_async: bool,
        bytes_per_second: float = math.inf,
        note_writing: Callable[[bool], object] = bool,
    ) -> None:
        """ranks: of a process group that nothing else uses, since a thread may call it.
        note_writing: called when a thread begins to write, and when it ends."""
        self._ranks = ranks
        self._note_writing = note_writing
        self._is_async = is_async
        self._pace = Pace(bytes_per_second)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.in_flight: Path | None = None
        """The checkpoint that is being written."""
        self._to_remove: list[Path] = []

    def save(self, snapshot: Snapshot) -> None:
        """Collective. Write the checkpoint, or start to, after an earlier one. Raises on all ranks:
        one has failed."""
        # One at a time: two writes would meet in one process group, and need two copies on the
        # host.
        self.finish()
        if not self._is_async:
            snapshot.write(self._ranks, self._pace)
            release_free_memory()
            return
        # The copy is made here, before the next step changes the tables; only writing it is left to
        # the thread.
        on_host = [snapshot.on_host()]
        self.in_flight = snapshot.path
        self._pace.begin()
        # A daemon: a run that gives up on a hanging file system can still exit.
        self._thread = threading.Thread(
            target=self._write, args=(on_host,), name="checkpoint", daemon=True
        )
        # Loggers look for checkpoints by path from the main thread: see wait_for_checkpoint.
        writing[snapshot.path] = self._thread
        self._note_writing(True)
        self._thread.start()

    def _write(self, on_host: list[Snapshot]) -> None:
        if sys.platform == "linux":  # there alone a thread has a priority of its own
            niceness = min(MAX_NICENESS, os.getpriority(os.PRIO_PROCESS, 0) + WRITER_NICENESS)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        try:
            # Taken out, so that nothing holds the copy once it is written.
            on_host.pop().write(self._ranks, self._pace)
        # A thread's exception would be printed and lost: `finish` raises it, on all ranks at the
        # same step.
        except BaseException as failure:
            self._failure = failure
        self._note_writing(False)
        release_free_memory()

    def remove(self, path: Path) -> None:
        """Remove a checkpoint; while one is being written, after that is complete, and not at all
        if it fails."""
        # ModelCheckpoint removes the old checkpoint right after it has asked for the new one, here
        # still in flight.
        if self._thread is not None:
            self._to_remove.append(path)
        elif self._ranks.rank == 0:  # all ranks come here, but the files are shared
            remove(path)

    @property
    def has_failed(self) -> bool:
        """Whether the write in flight on this rank has failed; `finish` raises on all ranks."""
        return self._failure is not None

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Collective. Wait for a write in flight, then remove what is to go. Raises on all ranks:
        it failed."""
        if self._thread is None:
            return
        began = time.monotonic()
        self._pace.lift()
        self._thread.join(timeout_seconds)
        # A thread cannot be stopped from outside: it may be in a collective or a system call.
        if self._thread.is_alive():
            seconds = time.monotonic() - began
            raise CheckpointError(
                f"giving up on a checkpoint that is still being written after {seconds:.0f} s."
            )
        if self.in_flight is not None:
            writing.pop(self.in_flight, None)
        # Before anything is raised, so that the next `finish` returns at once instead of raising it
        # again.
        self._thread = self.in_flight = None
        # Old checkpoints are removed only after the new one is complete, and not at all where it
        # failed.
        failure = self._failure
        self._failure = None
        to_remove = self._to_remove
        self._to_remove = []
        if failure is not None:
            raise failure
        for path in to_remove:
            self.remove(path)
