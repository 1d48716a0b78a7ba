"""Calls that differ from what was prefetched, or between ranks: a rank goes on until all ranks raise together.

A rank that raised at once would not reach the lookups, or the user's own collectives, in which the others wait for it.
The next lookup that is made as it is called carries the failure to all ranks, else the step's control message does.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_distrec import gpu
from lightning_distrec.errors import ProvenanceError, ShardingError
from lightning_distrec.ranks import Ranks

NOTICE_SECONDS = 30.0
"""How long a rank waits for the others to gather what differs; one may have failed in its step after all."""


@dataclass(frozen=True)
class WeightedCall:
    """A call of the running step whose weights followed its ids. learns: whether these need a gradient."""

    path: str
    learns: bool


def number_weights(calls: list[WeightedCall]) -> int:
    """Return what is alike on all ranks where these calls are, in 56 bits. 0 stands for none."""
    flags = bytes([call.learns for call in calls])
    # 7 bytes, so that the number and its negative fit into int64s of the message.
    return int.from_bytes(hashlib.blake2b(flags, digest_size=7).digest(), "big")


class LateComparison:
    """Compares inputs on a GPU with what was computed ahead; the host reads the result later. Not run on a GPU yet."""

    def __init__(self) -> None:
        self._differ: list[Tensor] = []
        self._sent: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is compared."""
        return not self._differ and self._sent is None

    def add(self, argument: Tensor, computed: Tensor) -> bool:
        """Compare two tensors of one shape on their device; they count as equal until the result is here."""
        if gpu.is_on_gpu(computed):  # it was computed on the stream of ids
            computed.record_stream(torch.cuda.current_stream(computed.device))
        # Reading the result would make the host wait for the GPU in the middle of the forward.
        self._differ.append((argument != computed).any())
        return True

    def end_step(self) -> None:
        """Send the step's result to the host, without waiting for it."""
        if not self._differ:
            return
        differ, self._differ = torch.stack(self._differ).any(), []
        if not gpu.is_on_gpu(differ):
            self._sent = differ
            return
        # To pinned memory: a copy to other memory makes the host wait for the GPU.
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


class DifferingCalls:
    """The calls of one trainer that differ."""

    def __init__(self, ranks: Ranks) -> None:
        self.late = LateComparison()
        """Inputs that the host has not compared."""
        self.failure: ProvenanceError | None = None
        """What this rank has found, for all ranks to raise."""
        self.is_reported = False
        """Whether the others know of it."""
        self._ranks = ranks

    def note(self, failure: ProvenanceError, make_rows: Callable[[], Any]) -> Any:
        """Note that a call differs, and return what it gets for rows. Of several, the first is raised."""
        self.failure = self.failure or failure
        try:
            return make_rows()
        except Exception as error:  # it cannot be called with this input in any case
            raise failure from error

    def agree_on_weights(self, calls: list[WeightedCall]) -> None:
        """Collective. Raise ShardingError where ranks differ in which weights need a gradient."""
        if calls:
            number = number_weights(calls)
            smallest, negated = self._ranks.start_all_reduce_min(number, -number).wait()
            if smallest != -negated:
                self.raise_unlike_weights(calls)

    def raise_unlike_weights(self, calls: list[WeightedCall]) -> None:
        """Collective. Raise ShardingError: ranks differ in which weights need a gradient."""
        gathered = self._ranks.all_gather([call.learns for call in calls])
        pairs = zip(calls, zip(*gathered, strict=True), strict=True)
        path, flags = next((call.path, flags) for call, flags in pairs if len(set(flags)) > 1)
        learning = [rank for rank, learns in enumerate(flags) if learns]
        raise ShardingError(
            f"'{path}' was called with ids whose weights need a gradient on ranks {learning} of {len(flags)}, and on "
            "no others. Freeze feature processors, and layers that compute weights, on all ranks alike."
        )

    def check_late(self, wait: bool = False) -> None:
        """Note what the host has not compared until now. wait: for what is not here yet."""
        try:
            self.late.check(wait)
        except ProvenanceError as failure:
            self.failure = self.failure or failure

    def raise_in_lookup(self) -> None:
        """Raise this rank's failure, if any, in a lookup that is made as it is called; that carries it to all ranks."""
        if self.failure is not None:
            self.is_reported = True
            raise self.failure

    def raise_failure(self, rank: int) -> None:
        """Collective. Raise this rank's failure, or that of `rank`, as its control message has announced."""
        self.is_reported = True
        # A rank that failed in the meantime does not come: the others raise all the same, with less to say.
        text = "a call differs from what was prefetched; that rank's own message says which"
        if self._ranks.barrier(NOTICE_SECONDS):
            text = self._ranks.all_gather(None if self.failure is None else str(self.failure))[rank]
        raise self.failure or ProvenanceError(f"rank {rank}: {text}")
