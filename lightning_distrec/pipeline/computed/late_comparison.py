"""Inputs on a GPU are compared with what was computed ahead on the GPU itself; the host reads the result a step later.

Not run on a GPU yet. On a CPU they are compared at once.
"""

import torch
from torch import Tensor

from lightning_distrec import gpu
from lightning_distrec.errors import ProvenanceError


class LateComparison:
    """The inputs of one step that were not compared by the host."""

    def __init__(self) -> None:
        self._differ: list[Tensor] = []
        self._sent: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is compared."""
        return not self._differ and self._sent is None

    def add(self, given: Tensor, computed: Tensor) -> bool:
        """Compare two tensors of one shape on their device; they count as equal until the result is here."""
        if gpu.is_on_gpu(computed):  # it was computed on the stream of ids
            computed.record_stream(torch.cuda.current_stream(computed.device))
        self._differ.append((given != computed).any())
        return True

    def end_step(self) -> None:
        """Send the step's result to the host, without waiting for it."""
        if not self._differ:
            return
        differ, self._differ = torch.stack(self._differ).any(), []
        if not gpu.is_on_gpu(differ):
            self._sent = differ
            return
        self._sent = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differ, non_blocking=True)
        self._arrived = torch.cuda.current_stream(differ.device).record_event()

    def check(self, wait: bool = False) -> None:
        """Raise ProvenanceError where an input of an earlier step differs. wait: for what is not here yet."""
        if wait:
            self.end_step()
        if self._sent is None:
            return
        if self._arrived is not None:
            if not wait and not self._arrived.query():
                return
            self._arrived.synchronize()
        sent, self._sent, self._arrived = self._sent, None, None
        if bool(sent):
            raise ProvenanceError(
                "a table was called with another input than the step's operations computed ahead of it, in an earlier "
                "step, whose update is wrong: resume from a checkpoint before it. Set prefetch={'computed_ids': False} "
                "to look up what the step computes as it is called."
            )
