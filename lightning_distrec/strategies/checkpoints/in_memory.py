"""Copies of the state in the nodes' memory: taken every few steps of a fit, and found again after a restart."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_distrec.checkpoint.atomic_folder import remove
from lightning_distrec.checkpoint.in_memory.node_folder import NodeFolder
from lightning_distrec.checkpoint.in_memory.part import (
    Part,
    check,
    checksums_of,
    facts_of,
    parts_in,
    path_of,
    write_checksums,
)
from lightning_distrec.checkpoint.load import load
from lightning_distrec.checkpoint.options import InMemoryOptions
from lightning_distrec.checkpoint.save import RanksOfThread, Saver, Snapshot, on_all_ranks, take_snapshot
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.strategies.checkpoints.copy_sizes import check_memory, own_bytes


class Copies:
    """The copies of a fit: two at most while one is taken, of which the older one stays until all nodes have the newer.

    ranks: for decisions. of_thread: all ranks, for the thread that copies while training goes on. node: the ranks on
    this node, for the same thread. nodes: the ranks on each node.
    """

    def __init__(
        self,
        options: InMemoryOptions,
        ranks: Consensus,
        of_thread: Consensus,
        node: Consensus,
        nodes: list[tuple[int, ...]],
    ) -> None:
        self.every = options.every
        self._root = Path(options.folder)
        self._ranks, self._of_thread, self._node, self._nodes = ranks, of_thread, node, nodes
        self._mine = next(of_node for of_node in nodes if ranks.rank in of_node)
        self._saver = Saver(node, is_async=True)
        self._folder: NodeFolder | None = None
        self._found: Part | None = None
        self.is_unwanted = False
        """Whether the fit was ended by its user, so that the copies are removed."""

    @property
    def folder(self) -> NodeFolder | None:
        """The folder of the fit in this node's memory; None where no fit has one."""
        return self._folder

    def open(self, job: str) -> None:
        """Collective. Begin a fit. job: its name. Raises ConfigError on every rank: see `NodeFolder.open`."""
        folder = NodeFolder(self._root, job)
        self._folder, self._found, self.is_unwanted = folder, None, False

        def make() -> None:
            if len(self._nodes) > 1:
                raise ConfigError(
                    f"checkpoint: in_memory keeps copies on one node, and the ranks are on {len(self._nodes)}: one "
                    "that is lost would take its copies with it. Set in_memory to null, and save often."
                )
            if self._node.rank == 0:
                folder.open()

        self._ranks.all_or_none("setup", make)

    def find(self, suits: Callable[[str], bool], pickles: bool) -> tuple[str, int, str] | None:
        """Collective. Return path, step and label of the furthest copy that all ranks can read; None for none.

        suits: whether a label is that of the fit; rank 0 decides.
        """
        if self._folder is None:
            return None
        held = self._ranks.all_gather(parts_in(self._folder.path) if self._node.rank == 0 else [])
        steps = sorted({(part.step, part.job) for of_rank in held for part in of_rank if suits(part.job)}, reverse=True)
        for step, label in self._ranks.all_gather(steps)[0]:
            mine = self._part_of(step, label, held[self._mine[0]])
            problems = self._ranks.all_gather(self._problem(mine, pickles))
            if mine is not None and not any(problems):
                self._found = mine
                return mine.path, step, label
            if problem := next(filter(None, problems), ""):
                rank_zero_warn(f"A copy in memory is skipped: {problem}.")
        return None

    def _part_of(self, step: int, label: str, held: list[Part]) -> Part | None:
        """Return the part in this node's memory from which its ranks can go on."""
        suitable = [
            part
            for part in held
            if (part.step, part.job) == (step, label)
            and (part.is_full or (part.ranks == self._mine and part.num_ranks == self._ranks.num_ranks))
        ]
        return suitable[0] if suitable else None

    def _problem(self, part: Part | None, pickles: bool) -> str:
        """Return why this rank cannot go on from a part; "" if it can."""
        if part is None:
            return f"not all nodes have it, or it was taken on other nodes than the {len(self._nodes)} of now"
        try:
            rank, num_ranks = self._place_in(part)
            load(Path(part.path), rank, num_ranks, pickles)
            # A part of another number of ranks has files of none of them in particular.
            return next(filter(None, (check(Path(part.path), r) for r in range(rank, len(part.ranks), num_ranks))), "")
        except (CheckpointError, OSError) as error:
            return str(error).rstrip(".")

    def _place_in(self, part: Part) -> tuple[int, int]:
        if part.is_full:
            return self._ranks.rank, self._ranks.num_ranks
        return self._node.rank, self._node.num_ranks

    def place(self, path: Any) -> tuple[int, int] | None:
        """Return as which rank of how many this one reads a copy; None where `path` is none that was found."""
        return self._place_in(self._found) if self._found is not None and str(path) == self._found.path else None

    def keep(self, path: str | None) -> None:
        """Collective. Remove all copies but the one that a fit goes on from. path: None: it goes on from none."""
        if self._folder is not None and self._node.rank == 0:
            _remove_others(self._folder.path, Path(path) if path is not None else None)

    # -- while a fit trains

    def check_memory(
        self, trainer: Trainer, of_tables: list[Optimizer], state_of: Callable[[Optimizer], dict[str, Any]]
    ) -> None:
        """Collective. Raise ConfigError on every rank: a node has too little memory.

        of_tables: optimizers of tables alone. state_of: returns an optimizer's state as it is saved.
        """
        assert self._folder is not None
        folder, optimizers = self._folder, [*trainer.optimizers, *of_tables]
        state = {**trainer.strategy.lightning_module_state_dict(), "": [state_of(each) for each in optimizers]}
        of_ranks = self._ranks.all_gather(own_bytes(state, optimizers, len(self._mine)))
        on_node = sum(of_ranks[rank] for rank in self._mine)
        self._ranks.all_or_none("setup", lambda: check_memory(folder, on_node, on_node))

    def path_at(self, step: int) -> Path:
        """Return where this node's copy of a step is."""
        assert self._folder is not None
        return path_of(self._folder.path, self._mine, step)

    def is_copy(self, path: Any) -> bool:
        """Whether a checkpoint that is to be saved is a copy in memory."""
        return self._folder is not None and Path(path).is_relative_to(self._folder.path)

    def save(
        self,
        path: Path,
        checkpoint: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        facts: dict[str, Any],
        plan_files: Mapping[str, bytes],
        pickles: bool,
    ) -> None:
        """Collective. Copy the tensors, and let a thread write them to memory, once it has done so with those before.

        Raises CheckpointError on every rank: these, or those before, could not be written.
        """
        self._saver.finish()
        marker = {**facts, **facts_of(self._mine, self._ranks.num_ranks)}
        snapshot = take_snapshot(path, checkpoint, rank_state, marker, self._node, plan_files, pickles)
        assert self._folder is not None
        self._saver.save(_Copy(snapshot, self._folder.path, self._of_thread))

    @property
    def has_failed(self) -> bool:
        """Whether the copy that is being taken has failed on this rank."""
        return self._saver.has_failed

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Collective where a copy is being taken. Wait for it. Raises CheckpointError on every rank: it has failed."""
        self._saver.finish(timeout_seconds)

    def end(self, has_failed: bool) -> None:
        """Remove the copies on this node, unless the fit has failed: then a restart may want them."""
        if has_failed and not self.is_unwanted:
            return
        folder, self._folder, self._found = self._folder, None, None
        if folder is not None and self._node.rank == 0:
            folder.remove()


@dataclass(frozen=True)
class _Copy:
    """What one rank writes to the memory of its node. root: where the job's parts are."""

    snapshot: Snapshot
    root: Path
    of_thread: Consensus

    @property
    def path(self) -> Path:
        """The part's path."""
        return self.snapshot.path

    def on_host(self) -> "_Copy":
        """Return a copy whose tensors share no memory with the module and its optimizers."""
        return replace(self, snapshot=self.snapshot.on_host())

    def write(self, ranks: RanksOfThread) -> None:
        """Collective. Write the part; older ones are removed once all nodes have theirs. ranks: on this node."""
        self.of_thread.all_or_none("copying to memory", lambda: self._write(ranks))
        if ranks.rank == 0:
            _remove_others(self.root, self.path)

    def _write(self, ranks: RanksOfThread) -> None:
        self.snapshot.write(ranks)
        mine = on_all_ranks(ranks, self.path, lambda: checksums_of(self.path, ranks.rank))
        of_ranks = ranks.all_gather(mine)
        on_all_ranks(ranks, self.path, lambda: write_checksums(self.path, of_ranks) if ranks.rank == 0 else None)


def _remove_others(root: Path, kept: Path | None) -> None:
    for path in root.glob("ranks_*/*"):
        if path != kept:
            remove(path)


class CopyToMemory(Checkpoint):
    """Takes a copy every few steps, at the end of a batch, as ModelCheckpoint saves.

    After the last batch of an epoch it waits for the end of the epoch: Lightning would resume from a state in between
    without the epoch's validation, and count its epochs wrongly (`reset` in loops/fit_loop.py).
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._num_taken = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Count from the step at which the fit begins."""
        self._num_taken = trainer.global_step // self._copies.every

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Collective where a copy is due."""
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._take(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Collective where a copy is due."""
        self._take(trainer)

    def _take(self, trainer: Trainer) -> None:
        num_due = trainer.global_step // self._copies.every
        if num_due != self._num_taken:
            self._num_taken = num_due
            trainer.save_checkpoint(self._copies.path_at(trainer.global_step))


@contextmanager
def copying(trainer: Trainer, copies: Copies) -> Iterator[None]:
    """Take copies while a fit trains."""
    if copies.folder is None:
        rank_zero_warn(
            "checkpoint: in_memory copies nothing: this job has no name by which a restart would find its copies. "
            "Start it by torchrun or Slurm, or set stopping={'run_name': ...}."
        )
        yield
        return
    callback = CopyToMemory(copies)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)
