"""Copies of tensors on the host, for a checkpoint that is written while training changes them.

From a GPU they go by way of a few slots of pinned memory into ordinary memory: torch rounds pinned memory up to powers
of two and keeps it for ever, so that pinned shards would take up to twice their size of a node's memory. Not run on a
GPU yet.
"""

from collections.abc import Mapping
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from lightning_distrec import gpu
from lightning_distrec.chunks import Chunk, ChunkedTensor

SLOT_BYTES = 16 * 2**20
NUM_SLOTS = 4


def copy_to_host(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """Return copies on the host of this rank's chunks; copies from GPUs overlap with each other."""
    ring = Ring(CudaCopies())

    def copy(chunk: Chunk) -> Chunk:
        source = chunk.tensor.detach()
        host = torch.empty(source.shape, dtype=source.dtype)
        if gpu.is_on_gpu(source):
            ring.copy(source, host)
        else:
            host.copy_(source)
        return Chunk(chunk.offsets, host)

    copies = {
        name: ChunkedTensor(full.shape, full.dtype, [copy(chunk) for chunk in full.chunks])
        for name, full in tensors.items()
    }
    ring.finish()
    return copies


class Arrival(Protocol):
    """A copy that was started."""

    def synchronize(self) -> None:
        """Wait until it has arrived."""


class Copies(Protocol):
    """Copies from a device."""

    def memory(self, num_bytes: int) -> Tensor:
        """Return memory that the device can copy to while the host goes on."""

    def start(self, source: Tensor, target: Tensor) -> Arrival:
        """Start to copy bytes."""


class CudaCopies:
    """Copies from GPUs, on the stream of the step: what comes after them there may overwrite what was copied."""

    def memory(self, num_bytes: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, source: Tensor, target: Tensor) -> Arrival:
        """Start to copy bytes."""
        target.copy_(source, non_blocking=True)
        return torch.cuda.current_stream(source.device).record_event()


class Ring:
    """Slots that copies go through, one after the other: while one is emptied on the host the others are filled."""

    def __init__(self, copies: Copies, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._copies = copies
        self._slot_bytes = slot_bytes
        self._slots = cycle([Slot() for _ in range(num_slots)])
        self._num_slots = num_slots

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor, which has all arrived after `finish` only. target: on the host, contiguous."""
        if not source.numel():
            return
        source, target = _bytes(source.contiguous()), _bytes(target)
        for block, place in zip(source.split(self._slot_bytes), target.split(self._slot_bytes), strict=True):
            slot = next(self._slots)
            slot.empty()
            if slot.memory is None:
                slot.memory = self._copies.memory(self._slot_bytes)
            filled = slot.memory[: block.numel()]
            slot.filled = self._copies.start(block, filled), filled, place

    def finish(self) -> None:
        """Wait for what has not arrived yet."""
        for _ in range(self._num_slots):
            next(self._slots).empty()


class Slot:
    """Memory for a copy at a time."""

    memory: Tensor | None = None
    filled: tuple[Arrival, Tensor, Tensor] | None = None
    """The copy that is in it or on its way, where, and the place that it goes to."""

    def empty(self) -> None:
        """Wait for the copy, and take it to its place."""
        if self.filled is not None:
            arrival, filled, place = self.filled
            arrival.synchronize()
            place.copy_(filled)
            self.filled = None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
