"""Unequal numbers of batches: all ranks stop after the last batch that every rank has, or repeat their own last one.

A rank that still has a batch when another has none would wait in the tables' exchange forever. Ranks compare the
lengths of sized loaders once, and the states of other loaders before every batch. Under uneven_inputs='join' a rank
gets its last batch again while another rank still has a batch of its own, and the loader records for each batch which
ranks have one of their own. What becomes of the repeated ones is up to the code that runs the steps.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader

from lightning_distrec.errors import ConfigError, DataError
from lightning_distrec.ranks import Ranks

UnevenInputs = Literal["stop", "error"]
UNEVEN_INPUTS: tuple[str, ...] = ("stop", "error")

FAILED, ENDED, HAS_BATCH = 0, 1, 2
"""What a loader gives when it is asked for a batch; the minimum over ranks decides."""


def check_uneven_inputs(value: str) -> None:
    """Raise ConfigError unless `value` is a known way to treat ranks with unequal numbers of batches."""
    if value not in UNEVEN_INPUTS:
        raise ConfigError(f"uneven_inputs={value!r} is not known. Use one of {', '.join(UNEVEN_INPUTS)}.")


def even(loader: Any, ranks: Ranks, mode: UnevenInputs, warn: Callable[[str], None]) -> Any:
    """Collective. Return a loader that gives the same number of batches on every rank, `loader` itself if it does.

    Raises DataError on every rank: the lengths differ and mode is "error"; a rank has no batch at all.
    """
    if ranks.num_ranks == 1:
        return loader
    lengths, are_exact = gathered_lengths(loader, ranks)
    if None in lengths:
        return EvenLoader(loader, ranks, EndPolicy(ranks, mode, warn))
    sizes = [length for length in lengths if length is not None]
    if not are_exact:
        return SizedEvenLoader(loader, ranks, EndPolicy(ranks, mode, warn), min(sizes))
    if len(set(sizes)) == 1:
        return loader
    text = f"the ranks have {', '.join(map(str, sizes))} batches of {type(loader).__name__}"
    if mode == "error":
        raise DataError(f"{text}, and uneven_inputs='error'. Give each rank as many, or set uneven_inputs='stop'.")
    if min(sizes) == 0:
        raise DataError(f"{text}: none that all of them have. Give every rank at least one batch.")
    warn(f"{text}; all stop after {min(sizes)} (uneven_inputs='stop').")
    return ShortenedLoader(loader, min(sizes))


def gathered_lengths(loader: Any, ranks: Ranks) -> tuple[list[int | None], bool]:
    """Collective. Return the length of every rank's loader, None where it has none, and whether all are exact.

    That of anything but a DataLoader over a map-style dataset may be an estimate.
    """
    is_exact = isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
    gathered = ranks.all_gather((sized_len(loader), is_exact))
    return [length for length, _ in gathered], all(exact for _, exact in gathered)


class Wrapper:
    """A loader around another one, which has all other attributes: sampler, dataset, state for resuming."""

    _attributes: tuple[str, ...] = ("ranks", "end", "agrees", "length")
    """Attributes of the wrappers; all others are the loader's."""

    def __init__(self, loader: Any) -> None:
        # Past our own __setattr__, which would hand the attributes on to the loader.
        object.__setattr__(self, "_loader", loader)
        # isinstance checks of Lightning's Protocol of stateful loaders pass over __getattr__ since Python 3.12.
        for name in ("state_dict", "load_state_dict"):
            if hasattr(loader, name):
                object.__setattr__(self, name, getattr(loader, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(object.__getattribute__(self, "_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._attributes:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class ShortenedLoader(Wrapper):
    """The first `length` batches of a sized loader."""

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self.length)


class EndPolicy:
    """What happens where the ranks' batches end at different places, or a rank's loader fails.

    mode: whether ranks that have more stop, or all raise. warn: called where they stop.
    """

    def __init__(self, ranks: Ranks, mode: UnevenInputs, warn: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._mode = mode
        self._warn = warn

    def apply(self, count: int, state: int, failure: Exception | None) -> None:
        """Collective. End the epoch after `count` batches, once not every rank has another one.

        Raises DataError on every rank: one rank's loader failed (it raises its own exception); the numbers of batches
        differ and mode is "error", or a rank has none.
        """
        states = self._ranks.all_gather((state, failure and f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (other, reported) in enumerate(states):
            if other == FAILED:
                raise DataError(f"the dataloader of rank {rank} failed at batch {count}: {reported}")
        longer = [rank for rank, (other, _) in enumerate(states) if other == HAS_BATCH]
        if not longer:
            return
        text = f"after {count} batches ranks {longer} have more, the others none"
        if self._mode == "error":
            raise DataError(f"{text}, and uneven_inputs='error'. Give each rank as many, or set uneven_inputs='stop'.")
        if count == 0:
            raise DataError(f"{text}: there is no batch that all ranks have. Give every rank at least one batch.")
        self._warn(f"{text}; all stop here (uneven_inputs='stop').")


class EvenLoader(Wrapper):
    """A loader of unknown length; the ranks agree before each batch that all of them have one.

    Iterating over it is collective: a callback that looks at batches on one rank only must take the loader from its
    own datamodule instead.
    """

    def __init__(self, loader: Any, ranks: Ranks, end: EndPolicy) -> None:
        super().__init__(loader)
        self.ranks = ranks
        self.end = end
        self.agrees = True
        """Whether iterators that begin now agree on their end; false where the fetcher of the batches does it."""

    def __iter__(self) -> Iterator[Any]:
        """Collective. Return batches while every rank has one. Raises DataError as `EndPolicy` does."""
        batches = iterate(self._loader)
        return self._agreed(batches) if self.agrees else batches

    def _agreed(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        while True:
            state, batch, failure = next_of(batches)
            if self.ranks.all_reduce_min(state) < HAS_BATCH:
                self.end.apply(count, state, failure)
                return
            count += 1
            yield batch


class SizedEvenLoader(EvenLoader):
    """The same over loaders with a length that may not be exact; `length` is the minimum over ranks."""

    def __init__(self, loader: Any, ranks: Ranks, end: EndPolicy, length: int) -> None:
        super().__init__(loader, ranks, end)
        self.length = length

    def __len__(self) -> int:
        return self.length


def iterate(loader: Any) -> Iterator[Any]:
    """Iterate over `loader`; one that fails to start fails at the first batch, where all ranks learn of it."""
    yield from loader


def next_of(batches: Iterator[Any]) -> tuple[int, Any, Exception | None]:
    """Return what a loader gives next: FAILED, ENDED or HAS_BATCH, the batch, the failure."""
    try:
        return HAS_BATCH, next(batches), None
    except StopIteration:
        return ENDED, None, None
    except Exception as failure:
        return FAILED, None, failure


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

    _attributes = ("ranks", "lengths", "own_batches")

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
            own_batches.append([rank_state == HAS_BATCH for rank_state in states])
            count += 1
            yield last

    def _states(self, state: int, failure: Exception | None, count: int) -> list[int]:
        """Collective. Return the state of every rank's loader. Raises DataError on every rank: one of them failed."""
        sent = [state if rank == self.ranks.rank else HAS_BATCH for rank in range(self.ranks.num_ranks)]
        states = list(self.ranks.start_all_reduce_min(*sent).wait())
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


def _no_batch(text: str) -> DataError:
    return DataError(f"{text}; uneven_inputs='join' needs a first one of all. Give every rank at least one batch.")


def _no_warning(message: str) -> None:
    pass
