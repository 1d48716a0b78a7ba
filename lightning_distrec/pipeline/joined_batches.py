"""Ranks whose batches are over go on with the others, which they let know of it.

A rank is handed its last batch again while another still has one of its own, and the loader says for each batch whose
are their own: what is made of the others is for whoever runs the steps.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader

from lightning_distrec.errors import DataError
from lightning_distrec.pipeline.even_batches import ENDED, FAILED, HAS_BATCH, EndPolicy, Wrapper, next_of


class Waits(Protocol):
    """An agreement under way."""

    def wait(self) -> list[int]:
        """Return what was agreed on."""


class Ranks(Protocol):
    """What this file needs of the ranks' consensus."""

    rank: int
    num_ranks: int

    def start_all_reduce_min(self, *values: int) -> Waits:
        """Collective. Begin to agree on the smallest of all ranks, for each of `values`."""

    def all_reduce_min(self, value: int) -> int:
        """Collective. Return the smallest value of all ranks."""

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's value."""


def join_loader(loader: Any, ranks: Ranks) -> Any:
    """Collective. Return a loader that gives as many batches as the rank with most has; `loader` itself if all do.

    Raises DataError on every rank: a rank has no batch at all.
    """
    if ranks.num_ranks == 1:
        return loader
    # The length of anything else may be an estimate.
    trusted = isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
    answers = ranks.all_gather((sized_len(loader), trusted))
    lengths = [length for length, _ in answers]
    if any(length is None for length in lengths):
        return JoinedLoader(loader, ranks)
    if not all(is_trusted for _, is_trusted in answers):
        return SizedJoinedLoader(loader, ranks, lengths)
    if len(set(lengths)) == 1:
        return loader
    if min(lengths) == 0:
        raise _no_batch(f"the ranks have {', '.join(map(str, lengths))} batches of {type(loader).__name__}")
    return CountedJoinedLoader(loader, ranks, lengths)


class JoinedLoader(Wrapper):
    """A loader of unknown length; the ranks agree before each batch on who has one. Iterating over it is collective."""

    _own = ("ranks", "lengths", "whose")

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        super().__init__(loader)
        self.ranks = ranks
        self.own_batches: deque[list[bool]] = deque()
        """For each batch that was handed on, the oldest first: which ranks have one of their own."""

    def __iter__(self) -> Iterator[Any]:
        self.own_batches = deque()
        return self._batches(self.own_batches)

    def _batches(self, own_batches: deque[list[bool]]) -> Iterator[Any]:
        batches = _started(self._loader)
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
        mine = [state if rank == self.ranks.rank else HAS_BATCH for rank in range(self.ranks.num_ranks)]
        states = list(self.ranks.start_all_reduce_min(*mine).wait())
        if FAILED in states:
            EndPolicy(self.ranks, "stop", _say_nothing).together(count, state, failure)
        return states


class SizedJoinedLoader(JoinedLoader):
    """The same over loaders that say how long they are, though it may not be exact."""

    def __init__(self, loader: Any, ranks: Ranks, lengths: list[int]) -> None:
        super().__init__(loader, ranks)
        self.lengths = lengths

    def __len__(self) -> int:
        return max(self.lengths)


class CountedJoinedLoader(SizedJoinedLoader):
    """The same over loaders of known lengths; nothing is left to agree on."""

    def _states(self, state: int, failure: Exception | None, count: int) -> list[int]:
        if failure is not None:
            raise failure
        return [HAS_BATCH if count < length else ENDED for length in self.lengths]


def _no_batch(said: str) -> DataError:
    return DataError(f"{said}; uneven_inputs='join' needs a first one of all. Give every rank at least one batch.")


def _started(loader: Any) -> Iterator[Any]:
    """Iterate over `loader`; a loader that fails to start fails at the first batch, where all ranks hear of it."""
    yield from loader


def _say_nothing(message: str) -> None:
    pass
