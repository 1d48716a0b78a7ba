"""Copies of the state in the nodes' memory: taken every few steps of a fit, and found again after a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_distrec.checkpoint.atomic_folder import remove
from lightning_distrec.checkpoint.in_memory.copying import NodeCopy, once_on_node, send_parts
from lightning_distrec.checkpoint.in_memory.node_folder import NodeFolder
from lightning_distrec.checkpoint.in_memory.part import Part, check, facts_of, parts_in, path_of
from lightning_distrec.checkpoint.incremental.loading import load
from lightning_distrec.checkpoint.options import InMemoryOptions
from lightning_distrec.checkpoint.save import PLAN_FILE, Saver, take_snapshot
from lightning_distrec.checkpoint.staging import HostBuffers
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.strategies.checkpoints.in_memory.series import CHAIN, CopySeries
from lightning_distrec.strategies.checkpoints.in_memory.sizes import SLOTS, check_memory, own_bytes
from lightning_distrec.strategies.checkpoints.tables.saved_tables import SavedTables


class Copies:
    """The copies of a fit. While one is taken, the one before stays until all nodes have the newer.

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
        self._series: CopySeries | None = None
        self._buffers = HostBuffers()
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
            if len({len(of_node) for of_node in self._nodes}) > 1:
                counts = ", ".join(str(len(of_node)) for of_node in self._nodes)
                raise ConfigError(
                    f"checkpoint: in_memory needs as many ranks on each node, because each sends its copy to one of "
                    f"the next node: there are {counts}. Start as many, or set in_memory to null."
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
            try:
                mine = self._take(step, label, held)
            except CheckpointError as error:
                rank_zero_warn(f"A copy in memory is skipped: {error}")
                continue
            problems = self._ranks.all_gather(self._problem(mine, pickles))
            if mine is not None and not any(problems):
                self._found = mine
                return mine.path, step, label
            rank_zero_warn(f"A copy in memory of step {step} is skipped: {next(filter(None, problems))}.")
        return None

    def _take(self, step: int, label: str, held: list[list[Part]]) -> Part | None:
        """Collective. Return the part for the ranks on this node, from another node where it is not here; or None.

        held: the parts in the memory of each rank's node, where the rank is the node's first. Raises CheckpointError on
        every rank: it could not be sent.
        """
        assert self._folder is not None
        of_nodes = [
            [p for p in held[of_node[0]] if (p.step, p.job) == (step, label) and self._is_for(p, of_node)]
            for of_node in self._nodes
        ]
        here = self._nodes.index(self._mine)
        for number, of_node in enumerate(self._nodes):
            if of_nodes[number]:
                continue
            for source, there in enumerate(self._nodes):
                part = next((p for p in held[there[0]] if (p.step, p.job, p.ranks) == (step, label, of_node)), None)
                if part is not None:
                    target = path_of(self._folder.path, of_node, step)
                    for mine in map(Path, part.paths):
                        paths = {here: mine if here == source else target.with_name(mine.name)}
                        paths = {source: paths[here]} if here in (source, number) else {}
                        send_parts([(source, number)], paths, self._nodes, self._ranks, self._node)
                    of_nodes[number] = [replace(part, path=str(target))]
                    break
        return of_nodes[here][0] if all(of_nodes) else None

    def _is_for(self, part: Part, of_node: tuple[int, ...]) -> bool:
        return part.is_full or (part.ranks == of_node and part.num_ranks == self._ranks.num_ranks)

    def _problem(self, part: Part | None, pickles: bool) -> str:
        """Return why this rank cannot go on from a part; "" if it can."""
        if part is None:
            return (
                f"no node has that of every node, or it was taken by other ranks than those on {len(self._nodes)} now"
            )
        try:
            rank, num_ranks = self._place_in(part)
            load(Path(part.path), rank, num_ranks, pickles)
            # A part of another number of ranks has files of none of them in particular.
            of_ranks = range(rank, len(part.ranks), num_ranks)
            return next(filter(None, (check(Path(path), r) for path in part.paths for r in of_ranks)), "")
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
        """Collective. Remove all copies but those that a fit goes on from. path: None: it goes on from none."""
        if self._folder is None or self._node.rank:
            return
        found = self._found if self.place(path) else None
        parts = [p for p in parts_in(self._folder.path) if found and (p.step, p.job) == (found.step, found.job)]
        kept = {path for part in parts for path in part.paths}
        for each in self._folder.path.glob("ranks_*/*"):
            if str(each) not in kept:
                remove(each)

    # -- while a fit trains

    def begin(
        self, trainer: Trainer, tables: SavedTables | None, state_of: Callable[[Optimizer], dict[str, Any]]
    ) -> None:
        """Collective. Follow the tables' changes; None: there are none. state_of: an optimizer's state as it is saved.

        Raises ConfigError on every rank: a node has too little memory.
        """
        if self._folder is None:
            return
        self._check_memory(self._folder, trainer, tables, state_of)
        self._series = None if tables is None else CopySeries(tables, trainer, self._ranks)

    def _check_memory(
        self,
        folder: NodeFolder,
        trainer: Trainer,
        tables: SavedTables | None,
        state_of: Callable[[Optimizer], dict[str, Any]],
    ) -> None:
        optimizers = [*trainer.optimizers, *(() if tables is None else tables.table_optimizers)]
        state = {**trainer.strategy.lightning_module_state_dict(), "": [state_of(each) for each in optimizers]}
        of_ranks = self._ranks.all_gather(own_bytes(state, optimizers, len(self._mine)))
        on_nodes = [sum(of_ranks[rank] for rank in of_node) for of_node in self._nodes]
        here = self._nodes.index(self._mine)
        guests = on_nodes[here - 1] if len(self._nodes) > 1 else 0
        slots = SLOTS if tables is None else SLOTS + CHAIN
        self._ranks.all_or_none("setup", lambda: check_memory(folder, on_nodes[here], on_nodes[here] + guests, slots))

    @property
    def plan_file(self) -> str | None:
        """The plan by which the copy was taken that the fit goes on from; None where any plan will do."""
        if self._found is None or self._found.is_full:
            return None
        path = Path(self._found.path) / PLAN_FILE
        return str(path) if path.exists() else None

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
        checkpoint: dict[str, Any],
        rank_state: Mapping[str, Any],
        facts: dict[str, Any],
        plan_files: Mapping[str, bytes],
        pickles: bool,
    ) -> None:
        """Collective. Copy the tensors, and let a thread write them to memory, once it has done so with those before.

        Raises CheckpointError on every rank: these, or those before, could not be written.
        """
        self._saver.finish()
        over, mark = ([], {}) if self._series is None else self._series.take(checkpoint, path.name)
        marker = {**facts, **mark, **facts_of(self._mine, self._ranks.num_ranks, over)}
        step = int(checkpoint["global_step"])
        if len(self._nodes) > 1:
            checkpoint = once_on_node(checkpoint, self._node)
        snapshot = take_snapshot(path, checkpoint, rank_state, marker, self._node, plan_files, pickles)
        if self._series is not None:
            self._series.count(snapshot.tensors)
        assert self._folder is not None
        copy = NodeCopy(snapshot, self._folder.path, step, self._of_thread, self._nodes, over, self._buffers)
        self._saver.save(copy)

    @property
    def has_failed(self) -> bool:
        """Whether the copy that is being taken has failed on this rank."""
        return self._saver.has_failed

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Collective where a copy is being taken. Wait for it. Raises CheckpointError on every rank: it has failed."""
        self._saver.finish(timeout_seconds)

    def release(self) -> None:
        """Stop following the tables; they are held no more."""
        if self._series is not None:
            self._series.release()
            self._series = None

    def end(self, has_failed: bool) -> None:
        """Remove the copies on this node, unless the fit has failed: then a restart may want them."""
        self._buffers.clear()
        if has_failed and not self.is_unwanted:
            return
        folder, self._folder, self._found = self._folder, None, None
        if folder is not None and self._node.rank == 0:
            folder.remove()
