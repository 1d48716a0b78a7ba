"""Writes a part into the memory of its node, and sends it to the next node, which keeps it as a guest."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lightning_distrec._compat.tensors import local_offsets
from lightning_distrec.checkpoint.atomic_folder import MARKER, UnfinishedFolder, clean_up, remove
from lightning_distrec.checkpoint.in_memory.exchange import Receiving, Sending, sizes_of, transfer
from lightning_distrec.checkpoint.in_memory.part import files_of, path_of
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.checkpoint.save import RanksOfThread, Snapshot, on_all_ranks
from lightning_distrec.checkpoint.staging import HostBuffers
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.errors import CheckpointError

Nodes = list[tuple[int, ...]]
"""The ranks on each node; as many on each."""


@dataclass(frozen=True)
class NodeCopy:
    """What one rank writes to the memory of its node. root: where the job's parts are. ranks: all, for the thread.

    over: the names of the copies that it is a difference to, one over the other. buffers: for full copies.
    """

    snapshot: Snapshot
    root: Path
    step: int
    ranks: RanksOfThread
    nodes: Nodes
    over: list[str]
    buffers: HostBuffers

    @property
    def path(self) -> Path:
        """The part's path."""
        return self.snapshot.path

    def on_host(self) -> "NodeCopy":
        """Return a copy whose tensors share no memory with the module and its optimizers."""
        return replace(self, snapshot=self.snapshot.on_host(None if self.over else self.buffers))

    def write(self, node: RanksOfThread) -> None:
        """Collective. Write the part and its guest; older ones are removed once all nodes have theirs.

        node: the ranks on this node. Raises CheckpointError on every rank: one of them could not; older ones stay.
        """
        snapshot = self.snapshot
        if len(self.nodes) > 1:
            snapshot = replace(snapshot, state=_state_of_rank_0(snapshot, self.ranks, node.rank == 0))
        on_all_ranks(self.ranks, self.path, lambda: snapshot.write(node))
        if len(self.nodes) > 1:
            here = next(number for number, of_node in enumerate(self.nodes) if self.ranks.rank in of_node)
            links = [(number, (number + 1) % len(self.nodes)) for number in range(len(self.nodes))]
            paths = {here: self.path, links[here - 1][0]: path_of(self.root, self.nodes[here - 1], self.step)}
            send_parts(links, paths, self.nodes, self.ranks, node)
        if node.rank == 0:
            for path in self.root.glob("ranks_*/*"):
                if path.name not in (self.path.name, *self.over):
                    remove(path)


def _state_of_rank_0(snapshot: Snapshot, ranks: RanksOfThread, keeps: bool) -> bytes | None:
    """Collective. Return rank 0's plain values: those of other ranks may differ, and a checkpoint has rank 0's."""
    names = zlib.crc32("\0".join(sorted(snapshot.tensors)).encode())
    facts = ranks.all_gather((names, len(snapshot.state or b"")))
    if any(of_rank[0] != names for of_rank in facts):
        raise CheckpointError(
            "checkpoint: in_memory: ranks have large tensors of other names than rank 0 has, in a callback or an "
            "optimizer. Set in_memory to null; checkpoints on disk can hold them."
        )
    mine = snapshot.state if ranks.rank == 0 and snapshot.state else bytes(facts[0][1])
    state = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    dist.broadcast(state, 0, group=ranks.group)
    return state.numpy().tobytes() if keeps else None


def send_parts(
    links: list[tuple[int, int]], paths: Mapping[int, Path], nodes: Nodes, ranks: RanksOfThread, node: RanksOfThread
) -> None:
    """Collective. Send parts from node to node, rank by rank; they are complete there when the call returns.

    links: for each part the number of the node that sends it, and of the one that gets it; each node sends one part at
    most, and gets one at most. paths: of the part that this node sends, by its own number, and of the one that it gets,
    by the number of the node that sends it. node: the ranks on this node.
    Raises CheckpointError on every rank: one of them could not read or write.
    """
    here = next(number for number, of_node in enumerate(nodes) if ranks.rank in of_node)
    to = next((to for source, to in links if source == here), None)
    source = next((source for source, to in links if to == here), None)
    path = paths[here] if here in paths else next(iter(paths.values()), Path())
    unfinished: list[UnfinishedFolder] = []

    def begin() -> tuple[str, list[tuple[str, int]]]:
        if source is not None and node.rank == 0:
            paths[source].parent.mkdir(exist_ok=True)
            clean_up(paths[source].parent)
            unfinished.append(UnfinishedFolder(paths[source]))
        return unfinished[0].path.name if unfinished else "", sizes_of(_files_to_send(paths.get(here), node, to))

    def complete() -> None:
        for folder in unfinished:
            marker = json.loads((folder.path / MARKER).read_text())
            (folder.path / MARKER).unlink()
            folder.complete({key: value for key, value in marker.items() if key not in ("format", "name", "files")})

    try:
        name, sizes = on_all_ranks(ranks, path, begin)
        of_ranks = ranks.all_gather((name, sizes))
        sending = receiving = None
        if to is not None:
            sending = Sending(_files_to_send(paths.get(here), node, to), nodes[to][node.rank])
        if source is not None:
            partner = nodes[source][node.rank]
            folder = paths[source].parent / of_ranks[nodes[here][0]][0]
            receiving = Receiving(folder, [(str(name), int(size)) for name, size in of_ranks[partner][1]], partner)
        on_all_ranks(ranks, path, lambda: transfer(sending, receiving, ranks.group))
        on_all_ranks(ranks, path, complete)
    finally:
        for folder_left in unfinished:
            folder_left.abandon()


def _files_to_send(path: Path | None, node: RanksOfThread, to: int | None) -> list[Path]:
    """Return the files that this rank sends of its node's part: its own, and on the first one those of nobody."""
    if to is None or path is None:
        return []
    of_ranks = [files_of(rank) for rank in range(node.num_ranks)]
    mine = [path / name for name in of_ranks[node.rank] if (path / name).exists()]
    others = {name for names in of_ranks for name in names}
    rest = [file for file in sorted(path.iterdir()) if file.name not in others and file.name != ".lock"]
    return mine + (rest if node.rank == 0 else [])


def once_on_node(checkpoint: Mapping[str, Any], node: RanksOfThread) -> dict[str, Any]:
    """Collective on a node. Return a checkpoint whose sharded tensors are all there that the node's ranks hold.

    Of a rectangle that several ranks hold, a checkpoint has the one of the first rank of all; a part, that of the first
    rank of its node.
    """
    found: dict[str, DTensor] = {}

    def look(value: Any, path: str) -> Any:
        if isinstance(value, DTensor) and any(isinstance(placement, Replicate) for placement in value.placements):
            found[path] = value
        return map_nested(value, path, look)

    look(dict(checkpoint), "")
    boxes = node.all_gather([(path, local_offsets(tensor)) for path, tensor in found.items()])

    def chunked(value: Any, path: str) -> Any:
        if path not in found:
            return map_nested(value, path, chunked)
        local, offsets = found[path].to_local().detach(), tuple(local_offsets(found[path]))
        is_mine = not any((path, offsets) in of_rank for of_rank in boxes[: node.rank]) and local.numel()
        return ChunkedTensor(tuple(value.shape), value.dtype, [Chunk(offsets, local)] if is_mine else [])

    return chunked(dict(checkpoint), "") if found else dict(checkpoint)
