"""Copies of tensors on the host: full ones, gathered, and this rank's chunks, for a thread that
writes them.

Chunks on a GPU go through a few slots of pinned memory into ordinary memory. torch rounds pinned
memory up to powers of two and keeps it for ever, so that pinned shards would take up to twice their
size. Not run on a GPU yet.
"""

import platform
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec import gpu
from lightning_distrec.checkpoint.plain_state import as_chunked, map_nested
from lightning_distrec.chunks import Box, Chunk, ChunkedTensor, narrowed, num_bytes, row_ranges
from lightning_distrec.errors import CheckpointError
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.ranks import Ranks

# A power of two, to which torch rounds pinned memory up anyway; 64 MiB with all slots.
SLOT_BYTES = 16 * 2**20
NUM_SLOTS = 4


def copy_to_host(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """Return copies on the host of this rank's chunks; copies from GPUs overlap with each other."""
    ring = Ring()

    def copy(chunk: Chunk) -> Chunk:
        source = chunk.tensor.detach()
        # Ordinary memory, as large as this rank's shards: pinned memory would never go back to the
        # system.
        host = torch.empty(source.shape, dtype=source.dtype)
        if gpu.is_on_gpu(source):
            ring.copy(source, host)
        else:
            host.copy_(source)
        return Chunk(chunk.offsets, host)

    copies = {}
    for name, full in tensors.items():
        chunks = list(map(copy, full.chunks))
        copies[name] = ChunkedTensor(full.shape, full.dtype, chunks)
    ring.finish()
    return copies


class Ring:
    """Slots of pinned memory that copies from a GPU go through: one is emptied on the host while
    others are filled."""

    def __init__(self, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._in_flight: deque[tuple[Any, Tensor, Tensor]] = deque()
        """Of each copy on its way: what to wait for, its slot, and the place that it goes to."""

    def new_slot(self, num_bytes: int) -> Tensor:
        """Return memory that the device can copy to while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, source: Tensor, target: Tensor) -> Any:
        """Start to copy bytes; return what `synchronize` of waits until they have arrived."""
        target.copy_(source, non_blocking=True)
        # On the step's stream: kernels of the next step, which overwrite the source, wait in line
        # behind the copy.
        return torch.cuda.current_stream(source.device).record_event()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor, which has all arrived after `finish` only. target: on the host,
        contiguous."""
        if not source.numel():
            return
        source, target = (
            tensor.view(-1).view(torch.uint8) for tensor in (source.contiguous(), target)
        )
        for block, place in zip(
            source.split(self._slot_bytes), target.split(self._slot_bytes), strict=True
        ):
            # New ones on first use: a rank with little to copy pins fewer slots.
            is_full = len(self._in_flight) == self._num_slots
            slot = self._empty() if is_full else self.new_slot(self._slot_bytes)
            self._in_flight.append((self.start(block, slot[: block.numel()]), slot, place))

    def finish(self) -> None:
        """Wait for what has not arrived yet."""
        while self._in_flight:
            self._empty()

    def _empty(self) -> Tensor:
        """Wait for the oldest copy, take it to its place, and return its slot."""
        arrival, slot, place = self._in_flight.popleft()
        # The slot's last copy must have arrived and left before it is filled again.
        arrival.synchronize()
        place.copy_(slot[: place.numel()])
        return slot


def gather_full(state: Any, ranks: Ranks, *, everywhere: bool = False, group: Any = None) -> Any:
    """Collective. Return nested dicts and lists with full tensors in place of sharded ones, on the
    host of rank 0.

    Other ranks get empty tensors in their place, but with `everywhere`. No device holds more than
    shards and a block.
    group: a gloo group to send them over, for a thread; None: the default group.
    Raises CheckpointError on every rank: a host has not enough free memory for those of its ranks.
    """
    sharded: list[ChunkedTensor] = []

    def collect(leaf: Any, path: str) -> Any:
        chunked = as_chunked(leaf)
        if chunked is None:
            return leaf
        sharded.append(chunked)
        return chunked

    state = map_nested(state, collect)
    host = platform.node()
    # `everywhere` is the same on all ranks, so that all or none gather. Ranks of one host share its
    # memory.
    ranks_of_host = ranks.all_gather(host).count(host) if everywhere else int(ranks.rank == 0)
    needed = sum(map(num_bytes, sharded)) * ranks_of_host

    def check() -> None:
        free = free_host_bytes()
        if needed <= free:
            return
        place = "every rank" if everywhere else "rank 0"
        advice = "checkpoint={'distributed': True}, where each rank writes its own shards"
        if everywhere:
            advice = "rank_0_only=True, or load a checkpoint into a new module in one process"
        raise CheckpointError(
            f"full tensors on {place} need {needed:,} bytes of the host {host}, which has {free:,} "
            f"free. Set {advice}."
        )

    # Before the first block: a rank that ran out of memory later would leave the others waiting.
    ranks.all_or_none("gathering the tables", check)
    local_boxes = []
    for chunked in sharded:
        local_boxes.append([chunk.box for chunk in chunked.chunks])
    per_rank_boxes = ranks.all_gather(local_boxes)
    # By identity: a ChunkedTensor of this list is what `collect` put into the state.
    full: dict[int, Tensor] = {}
    for i, chunked in enumerate(sharded):
        boxes = [rank_boxes[i] for rank_boxes in per_rank_boxes]
        full[id(chunked)] = _send(chunked, boxes, ranks, group, everywhere)

    def put(leaf: Any, path: str) -> Any:
        return full[id(leaf)] if isinstance(leaf, ChunkedTensor) else leaf

    return map_nested(state, put)


def _send(
    chunked: ChunkedTensor, boxes: list[list[Box]], ranks: Ranks, group: Any, to_all: bool
) -> Tensor:
    """Collective. Return the full tensor, on rank 0's host or on all; an empty one on others.
    boxes: each rank's."""
    rank = ranks.rank
    receives = rank == 0 or to_all
    full = torch.empty(chunked.shape if receives else 0, dtype=chunked.dtype)
    zero = (0,) * len(chunked.shape)
    local_chunks = {chunk.box: chunk.tensor for chunk in chunked.chunks}
    uses_gpu = ranks.num_ranks > 1 and group is None and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
    # All ranks walk the same boxes in the same order, so that sends, receives and broadcasts pair
    # up.
    for source, source_boxes in enumerate(boxes):
        for offsets, shape in source_boxes:
            for first, count in row_ranges(shape, chunked.dtype.itemsize):
                box = (offsets[0] + first, *offsets[1:]), (count, *shape[1:])
                block = (
                    local_chunks[offsets, shape][first : first + count] if source == rank else None
                )
                # Sends go from one rank to rank 0: the others take no part. With `to_all` every
                # rank receives.
                if block is None and not receives:
                    continue
                # NCCL sends no tensors on the host.
                rows = (
                    torch.empty(box[1], dtype=chunked.dtype, device=device)
                    if block is None
                    else block.to(device)
                )
                rows = rows.contiguous()
                if to_all and ranks.num_ranks > 1:
                    dist.broadcast(rows, src=source, group=group)
                elif rank == 0 and source:
                    dist.recv(rows, src=source, group=group)
                elif rank:
                    dist.send(rows, dst=0, group=group)
                if receives:
                    narrowed(full, zero, box).copy_(rows)
                del rows  # before there is another block
    return full
