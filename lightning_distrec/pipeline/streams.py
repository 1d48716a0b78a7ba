"""CUDA streams: batches are copied on one and their ids are exchanged on another, during the computation.

Not run on a GPU yet; tests/support/emulated_streams.py emulates the streams on a CPU. Without a GPU there is nothing of
it: gloo's threads work during the computation by themselves.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_distrec import gpu
from lightning_distrec._compat.tensors import parts_of
from lightning_distrec.pipeline.provenance.batch_objects import tensors_in


class Streams:
    """The streams of one rank. device: that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = gpu.is_gpu(device)
        self._copies = torch.cuda.Stream(device) if on_gpu else None
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

    def exchanging(self) -> AbstractContextManager[Any]:
        """Return the context in which ids are checked and exchanged, after `copied` was called with their batch."""
        return nullcontext() if self.ids is None else torch.cuda.stream(self.ids)

    def copied(self, batch: Any) -> Any:
        """Let the stream of ids use a batch that was copied; returns the event that `hand_over` waits for."""
        if self._copies is None or self.ids is None:
            return None
        event = self._copies.record_event()
        self.ids.wait_event(event)
        for tensor in self._on_device(batch):
            tensor.record_stream(self.ids)
        return event

    def hand_over(self, batch: Any, copied: Any) -> None:
        """Let the stream of the step use the batch from now on."""
        if copied is None:
            return
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copied)
        for tensor in self._on_device(batch):
            tensor.record_stream(now)

    def _on_device(self, batch: Any) -> list[Tensor]:
        return [part for tensor in tensors_in(batch) if gpu.is_on_gpu(tensor) for part in parts_of(tensor)]
