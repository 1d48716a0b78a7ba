"""What the ranks tell each other about every step: one small message, sent early and read later.

It says whether every rank has the batch that comes after the next, whether that batch's ids are in range and can travel
ahead, and whether all is well in the step that goes on.
"""

from dataclasses import dataclass
from typing import Protocol

from lightning_distrec.errors import ProvenanceError, RankError
from lightning_distrec.pipeline.even_batches import HAS_BATCH

WELL = 2**31
"""No rank has trouble; a rank that has says rank * 2 + kind."""
BROKEN_PROVENANCE, FAILED_STEP = 0, 1


class PendingMin(Protocol):
    """Numbers that all ranks are agreeing on."""

    def wait(self) -> list[int]:
        """Return the agreed numbers."""

    def wait_up_to(self, seconds: float) -> None:
        """Wait for the other ranks for some time; whether they came is not told."""


class Ranks(Protocol):
    """What the pipeline needs of the ranks' consensus."""

    rank: int
    num_ranks: int

    def start_all_reduce_min(self, *values: int) -> PendingMin:
        """Collective. Begin to agree on the smallest of all ranks, for each of the values."""

    def all_gather(self, value: object) -> list[object]:
        """Collective. Return every rank's value."""


@dataclass(frozen=True)
class BatchStatus:
    """What one rank says, and, of all ranks together, what was agreed."""

    state: int = HAS_BATCH
    """Of the batch that is spoken of: what the loader gave."""
    ready: bool = False
    """Its lookups are prepared, to be sent ahead."""
    ids_in_range: bool = True
    sizes: tuple[tuple[int, int], ...] = ()
    """For each of its lookups the least and the most examples of any rank; one rank's own number is both."""
    trouble: int = WELL


class ControlMessage:
    """Collective. One message of all ranks on its way; all say as many sizes."""

    def __init__(self, ranks: Ranks, mine: BatchStatus) -> None:
        self._rank = ranks.rank
        self._mine = mine
        flags = (mine.state, int(mine.ready), int(mine.ids_in_range), mine.trouble)
        leasts = [least for least, _ in mine.sizes]
        mosts = [-most for _, most in mine.sizes]
        self._agreement: PendingMin | None = ranks.start_all_reduce_min(*flags, *leasts, *mosts)
        self._said = mine

    def read(self) -> BatchStatus:
        """Return what was agreed; waits for the other ranks the first time."""
        if self._agreement is not None:
            state, ready, in_range, trouble, *sizes = self._agreement.wait()
            self._agreement = None
            half = len(sizes) // 2
            pairs = tuple((least, -most) for least, most in zip(sizes[:half], sizes[half:], strict=True))
            self._said = BatchStatus(state, bool(ready), bool(in_range), pairs, trouble)
        return self._said

    def wait_up_to(self, seconds: float) -> None:
        """Wait for the other ranks to have heard this one, but no longer."""
        if self._agreement is not None:
            self._agreement.wait_up_to(seconds)

    def raise_trouble(self) -> None:
        """Raise on the ranks that are well what another rank has; the other one raises by itself."""
        trouble = self.read().trouble
        if trouble == WELL or self._mine.trouble != WELL:
            return
        rank, kind = divmod(trouble, 2)
        if kind == BROKEN_PROVENANCE:
            raise ProvenanceError(
                f"rank {rank}: a sharded table was called with another input than in the first step; that rank's own "
                "message names it. Set pipeline={'depth': 1} to look tables up as they are called."
            )
        raise RankError(f"rank {rank} failed inside of its step; that rank's own message says why.")
