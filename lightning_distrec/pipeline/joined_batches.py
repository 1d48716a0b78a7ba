"""Lets ranks whose batches have ended go on with the others.

A rank gets its last batch again while another rank still has a batch of its own, and the loader records for each
batch which ranks have one of their own. What becomes of the repeated ones is up to the code that runs the steps.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning_distrec.errors import DataError
from lightning_distrec.pipeline.even_batches import (
    ENDED,
    FAILED,
    HAS_BATCH,
    EndPolicy,
    Wrapper,
    gathered_lengths,
    iterate,
    next_of,
)
from lightning_distrec.ranks import Ranks


def join_loader(loader: Any, ranks: Ranks) -> Any:
    """Collective. Return a loader that gives as many batches as the rank with most has; `loader` itself if all do.

    Raises DataError on every rank: a rank has no batch at all.
    """
    if ranks.num_ranks == 1:
        return loader
    lengths, are_exact = gathered_lengths(loader, ranks)
    if None in lengths:
        return JoinedLoader(loader, ranks)
    sizes = [length for length in lengths if length is not None]
    if not are_exact:
        return SizedJoinedLoader(loader, ranks, sizes)
    if len(set(sizes)) == 1:
        return loader
    if min(sizes) == 0:
        raise _no_batch(f"the ranks have {', '.join(map(str, sizes))} batches of {type(loader).__name__}")
    return CountedJoinedLoader(loader, ranks, sizes)


class JoinedLoader(Wrapper):
    """A loader of unknown length; the ranks agree before each batch on who has one. Iterating over it is collective."""

    _own = ("ranks", "lengths", "own_batches")

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        super().__init__(loader)
        self.ranks = ranks
        self.own_batches: deque[list[bool]] = deque()
        """For each batch that was yielded, the oldest first: which ranks have one of their own."""

    def __iter__(self) -> Iterator[Any]:
        self.own_batches = deque()
        return self._batches(self.own_batches)

    def _batches(self, own_batches: deque[list[bool]]) -> Iterator[Any]:
        batches = iterate(self._loader)
        state, last, failure, count = HAS_BATCH, None, None, 0
        while True:
            if state == HAS_BATCH:
                state, batch, failure = next_of(batches)
                last = batch if state == HAS_BATCH else last
            states = self._states(state, failure, count)
            if HAS_BATCH not in states:
                return
            if count == 0 and ENDED in states:
                raise _no_batch(f"rank {states.index(ENDED)} has no batch")
            own_batches.append([of_rank == HAS_BATCH for of_rank in states])
            count += 1
            yield last

    def _states(self, state: int, failure: Exception | None, count: int) -> list[int]:
        """Collective. Return the state of every rank's loader. Raises DataError on every rank: one of them failed."""
        own = [state if rank == self.ranks.rank else HAS_BATCH for rank in range(self.ranks.num_ranks)]
        states = list(self.ranks.start_all_reduce_min(*own).wait())
        if FAILED in states:
            EndPolicy(self.ranks, "stop", _no_warning).apply(count, state, failure)
        return states


class SizedJoinedLoader(JoinedLoader):
    """The same over loaders with a length that may not be exact."""

    def __init__(self, loader: Any, ranks: Ranks, lengths: list[int]) -> None:
        super().__init__(loader, ranks)
        self.lengths = lengths

    def __len__(self) -> int:
        return max(self.lengths)


class CountedJoinedLoader(SizedJoinedLoader):
    """The same over loaders of exact lengths, which need no collective."""

    def _states(self, state: int, failure: Exception | None, count: int) -> list[int]:
        if failure is not None:
            raise failure
        return [HAS_BATCH if count < length else ENDED for length in self.lengths]


def _no_batch(found: str) -> DataError:
    return DataError(f"{found}; uneven_inputs='join' needs a first one of all. Give every rank at least one batch.")


def _no_warning(message: str) -> None:
    pass
