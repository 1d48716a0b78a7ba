"""CUDA streams: batches are copied on one and their ids are exchanged on another, during the computation.

Not run on a GPU yet. On a CPU there is nothing of it: gloo's threads work during the computation by themselves.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_distrec._compat.torch import pin_memory
from lightning_distrec.pipeline.provenance.batch_objects import tensors_in


class Streams:
    """The streams of one rank. device: that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        self.ids = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        """On which ids are checked and exchanged; None on a CPU."""

    def pinned(self, batch: Any) -> Any:
        """Return the batch in memory that a GPU can copy from while the host goes on."""
        return batch if self._copies is None else pin_memory(batch)

    def copying(self) -> AbstractContextManager[Any]:
        """Return the context in which a batch is copied."""
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def exchanging(self) -> AbstractContextManager[Any]:
        """Return the context in which ids are checked and exchanged, after `copied` was called with their batch."""
        return nullcontext() if self.ids is None else torch.cuda.stream(self.ids)

    def copied(self, batch: Any) -> Any:
        """Let the stream of ids use a batch that was copied; returns the event that `hand_over` waits for."""
        if self._copies is None or self.ids is None:
            return None
        event = self._copies.record_event()
        self.ids.wait_event(event)
        for tensor in tensors_in(batch):
            if tensor.is_cuda:
                tensor.record_stream(self.ids)
        return event

    def hand_over(self, batch: Any, copied: Any) -> None:
        """Let the stream of the step use the batch from now on."""
        if copied is None:
            return
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copied)
        for tensor in tensors_in(batch):
            if tensor.is_cuda:
                tensor.record_stream(now)
