"""Calls that differ from what was prefetched, or between ranks: a rank goes on until all ranks raise together.

A rank that raised at once would not reach the lookups, or the user's own collectives, in which the others wait for it.
The next lookup that is made as it is called carries the failure to all ranks, else the step's control message does.
"""

from collections.abc import Callable
from typing import Any

from lightning_distrec.errors import ProvenanceError, ShardingError
from lightning_distrec.pipeline.computed.late_comparison import LateComparison
from lightning_distrec.ranks import Ranks

NOTICE_SECONDS = 30.0
"""How long a rank waits for the others to gather what differs; one may have failed in its step after all."""


class DifferingCalls:
    """The calls of one trainer that differ."""

    def __init__(self, ranks: Ranks) -> None:
        self.late = LateComparison()
        """Inputs that the host has not compared."""
        self.failure: ProvenanceError | None = None
        """What this rank has found, for all ranks to raise."""
        self.learned = 1
        """The bits of this step's lookups whose weights followed the ids: 1 where these need a gradient; before, a 1.
        Where ranks differ, those with gradients would wait in backward for the others. A step begins with 1."""
        self._paths: list[str] = []
        self._is_reported = False
        self._ranks = ranks

    @property
    def is_unreported(self) -> bool:
        """Whether this rank has found something that the others do not know of."""
        return self.failure is not None and not self._is_reported

    def note(self, failure: ProvenanceError, make_rows: Callable[[], Any]) -> Any:
        """Note that a call differs, and return what it gets for rows. Of several, the first is raised."""
        self.failure = self.failure or failure
        try:
            return make_rows()
        except Exception as error:  # it cannot be called with this input in any case
            raise failure from error

    def note_weights(self, path: str, learn: bool) -> None:
        """Note whether the weights of a lookup of the table at `path`, which followed its ids, need a gradient."""
        if self.learned == 1:  # the step's first
            self._paths = []
        self.learned = self.learned * 2 + learn
        self._paths.append(path)

    def agree_on_weights(self) -> None:
        """Collective. Raise ShardingError where ranks differ in which weights need a gradient."""
        if self.learned > 1:
            smallest, negated = self._ranks.start_all_reduce_min(self.learned, -self.learned).wait()
            if smallest != -negated:
                self.raise_of_weights()

    def raise_of_weights(self) -> None:
        """Collective. Raise ShardingError: ranks differ in which weights need a gradient."""
        of_ranks = [f"{learned:b}"[1:] for learned in self._ranks.all_gather(self.learned)]
        call = next(i for i, bits in enumerate(zip(*of_ranks, strict=True)) if len(set(bits)) > 1)
        learning = [rank for rank, bits in enumerate(of_ranks) if bits[call] == "1"]
        raise ShardingError(
            f"'{self._paths[call]}' was called with ids whose weights need a gradient on ranks {learning} of "
            f"{len(of_ranks)}, and on no others. Freeze feature processors, and layers that compute weights, on all "
            "ranks alike."
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
            self._is_reported = True
            raise self.failure

    def raise_failure(self, rank: int) -> None:
        """Collective. Raise this rank's failure, or that of `rank`, as its control message has announced."""
        self._is_reported = True
        text = "a call differs from what was prefetched; that rank's own message says which"
        if self._ranks.barrier(NOTICE_SECONDS):
            text = self._ranks.all_gather(None if self.failure is None else str(self.failure))[rank]
        raise self.failure or ProvenanceError(f"rank {rank}: {text}")
