"""Batches on a GPU: they are copied from pinned memory on one CUDA stream, and their ids are exchanged on another.

Not run on a GPU yet; tests/support/emulated_streams.py emulates the streams on a CPU. Without a GPU there is nothing of
it: gloo threads work during the computation by themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec.streamable import Pipelineable

from lightning_distrec import gpu
from lightning_distrec._compat.tensors import parts_of
from lightning_distrec.prefetch.batch_objects import tensors_in


class Streams:
    """The streams of one rank. device: that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = gpu.is_gpu(device)
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        # High priority: its small kernels must not queue behind those of the forward.
        self.ids = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        """On which ids are checked and exchanged; None on a CPU."""

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams."""
        return self._copies is not None

    def copying(self, drawn: Any) -> AbstractContextManager[Any]:
        """Return the context in which a batch is copied. drawn: as the loader gave it."""
        if self._copies is None:
            return nullcontext()
        on_device = self._on_device(drawn)
        if on_device:  # a loader on the GPU: its kernels are in the stream that was current
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in on_device:
                tensor.record_stream(self._copies)
        return torch.cuda.stream(self._copies)

    @contextmanager
    def preparing(self, reads_written_tensors: Callable[[], bool]) -> Iterator[None]:
        """Compute and check ids in the context, after `copied` was called with their batch.

        reads_written_tensors: whether they depend on tensors that the stream of the step writes to.
        """
        if self.ids is None:
            yield
            return
        step, is_ordered = torch.cuda.current_stream(self._device), reads_written_tensors()
        if is_ordered:
            self.ids.wait_stream(step)
        with torch.cuda.stream(self.ids):
            yield
        if is_ordered:  # the step's next write comes after these reads
            step.wait_stream(self.ids)

    def copied(self, batch: Any) -> Any:
        """Let the stream of ids use a batch that was copied; returns the event that `hand_over` waits for."""
        if self._copies is None or self.ids is None:
            return None
        # The allocator must not give this memory away while kernels on the stream of ids may still read it.
        event = self._copies.record_event()
        self.ids.wait_event(event)
        for tensor in self._on_device(batch):
            tensor.record_stream(self.ids)
        return event

    def hand_over(self, batch: Any, copied: Any) -> None:
        """Let the stream of the step use the batch from now on."""
        if copied is None:
            return
        stream = torch.cuda.current_stream(self._device)
        # The copies' stream has allocated the memory, and could use it again while kernels of the step still read it.
        stream.wait_event(copied)
        for tensor in self._on_device(batch):
            tensor.record_stream(stream)

    def _on_device(self, batch: Any) -> list[Tensor]:
        return [part for tensor in tensors_in(batch) if gpu.is_on_gpu(tensor) for part in parts_of(tensor)]


@runtime_checkable
class Pinnable(Protocol):
    """A tensor, a KeyedJaggedTensor, or what defines pin_memory for DataLoaders."""

    def pin_memory(self) -> Any:
        """Return a copy in pinned memory."""


def pin(batch: Any) -> Any:
    """Return the batch with its dense tensors on the host pinned, in dicts, lists, tuples and dataclasses."""
    return apply_to_collection(batch, Pinnable, _pin, allow_frozen=True)


def _pin(data: Any) -> Any:
    tensors = [data] if isinstance(data, Tensor) else tensors_in(data)
    can_be = all(tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_nested for tensor in tensors)
    return data.pin_memory() if can_be else data


def move_jagged(batch: Any, device: torch.device) -> Any:
    """Return the batch with KeyedJaggedTensors copied to the device, for which Lightning's `to(device)` would wait."""
    return apply_to_collection(batch, Pipelineable, lambda data: data.to(device, non_blocking=True), allow_frozen=True)
