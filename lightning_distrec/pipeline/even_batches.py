"""All ranks stop after the last batch that all of them have.

A rank that still has a batch when another has none would wait in the tables' exchange for ever. Sized loaders agree on
their lengths once; others agree before every batch.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal, Protocol

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader

from lightning_distrec.errors import ConfigError, DataError

UnevenInputs = Literal["stop", "error"]
UNEVEN_INPUTS: tuple[str, ...] = ("stop", "error")

FAILED, ENDED, HAS_BATCH = 0, 1, 2
"""What a loader gives when it is asked for a batch, the least first."""


class Ranks(Protocol):
    """What this file needs of the ranks' consensus."""

    num_ranks: int

    def all_reduce_min(self, value: int) -> int:
        """Collective. Return the smallest value of all ranks."""

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's value."""


def check_uneven_inputs(value: str) -> None:
    """Raise ConfigError where `value` is no way to treat ranks with unequal numbers of batches."""
    if value not in UNEVEN_INPUTS:
        raise ConfigError(f"uneven_inputs={value!r} is not known. Use one of {', '.join(UNEVEN_INPUTS)}.")


def even(loader: Any, ranks: Ranks, mode: UnevenInputs, warn: Callable[[str], None]) -> Any:
    """Collective. Return a loader that gives the same number of batches on every rank, `loader` itself if it does.

    Raises DataError on every rank: the lengths differ and mode is "error"; a rank has no batch at all.
    """
    if ranks.num_ranks == 1:
        return loader
    # The length of anything else may be an estimate: it is passed on, and not relied on.
    trusted = isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
    answers = ranks.all_gather((sized_len(loader), trusted))
    lengths = [length for length, _ in answers]
    if any(length is None for length in lengths):
        return EvenLoader(loader, ranks, EndPolicy(ranks, mode, warn))
    if not all(is_trusted for _, is_trusted in answers):
        return SizedEvenLoader(loader, ranks, EndPolicy(ranks, mode, warn), min(lengths))
    if len(set(lengths)) == 1:
        return loader
    said = f"the ranks have {', '.join(map(str, lengths))} batches of {type(loader).__name__}"
    if mode == "error":
        raise DataError(f"{said}, and uneven_inputs='error'. Give each rank as many, or set uneven_inputs='stop'.")
    if min(lengths) == 0:
        raise DataError(f"{said}: none that all of them have. Give every rank at least one batch.")
    warn(f"{said}; all stop after {min(lengths)} (uneven_inputs='stop').")
    return ShortenedLoader(loader, min(lengths))


class Wrapper:
    """A loader that passes on what it does not do itself: samplers, datasets, state for resuming."""

    _own: tuple[str, ...] = ("ranks", "end", "agrees", "length")
    """Attributes of the wrappers; all others are the loader's."""

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_loader", loader)
        # Python 3.12 and newer see that a loader has a state by attributes that are there, not by __getattr__.
        for name in ("state_dict", "load_state_dict"):
            if hasattr(loader, name):
                object.__setattr__(self, name, getattr(loader, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(object.__getattribute__(self, "_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
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
    """What becomes of ranks whose batches end, or whose loader fails, at different places.

    warn: says, where ranks have more, that they stop.
    """

    def __init__(self, ranks: Ranks, mode: UnevenInputs, warn: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._mode = mode
        self._warn = warn

    def together(self, count: int, state: int, failure: Exception | None) -> None:
        """Collective, once not every rank has another batch. Return where all have ended after `count` batches.

        Raises DataError on every rank: one rank's loader failed (it raises its own exception); the numbers of batches
        differ and mode is "error", or a rank has none.
        """
        states = self._ranks.all_gather((state, failure and f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (other, said) in enumerate(states):
            if other == FAILED:
                raise DataError(f"the dataloader of rank {rank} failed at batch {count}: {said}")
        longer = [rank for rank, (other, _) in enumerate(states) if other == HAS_BATCH]
        if not longer:
            return
        said = f"after {count} batches ranks {longer} have more, the others none"
        if self._mode == "error":
            raise DataError(f"{said}, and uneven_inputs='error'. Give each rank as many, or set uneven_inputs='stop'.")
        if count == 0:
            raise DataError(f"{said}: there is no batch that all ranks have. Give every rank at least one batch.")
        self._warn(f"{said}; all stop here (uneven_inputs='stop').")


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
        """Whether iterators that begin now agree; false where whoever fetches the batches does."""

    def __iter__(self) -> Iterator[Any]:
        """Collective. Return batches while every rank has one. Raises DataError as `EndPolicy` does."""
        batches = _started(self._loader)
        return self._agreed(batches) if self.agrees else batches

    def _agreed(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        while True:
            state, batch, failure = next_of(batches)
            if self.ranks.all_reduce_min(state) < HAS_BATCH:
                self.end.together(count, state, failure)
                return
            count += 1
            yield batch


class SizedEvenLoader(EvenLoader):
    """The same over loaders that say how long they are, though it may not be exact; `length` is the least of them."""

    def __init__(self, loader: Any, ranks: Ranks, end: EndPolicy, length: int) -> None:
        super().__init__(loader, ranks, end)
        self.length = length

    def __len__(self) -> int:
        return self.length


def _started(loader: Any) -> Iterator[Any]:
    """Iterate over `loader`; a loader that fails to start fails at the first batch, where all ranks hear of it."""
    yield from loader


def next_of(batches: Iterator[Any]) -> tuple[int, Any, Exception | None]:
    """Return what a loader gives next: FAILED, ENDED or HAS_BATCH, the batch, the failure."""
    try:
        return HAS_BATCH, next(batches), None
    except StopIteration:
        return ENDED, None, None
    except Exception as failure:
        return FAILED, None, failure
