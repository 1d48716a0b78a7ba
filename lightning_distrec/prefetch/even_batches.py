"""Stops all ranks after the last batch that every rank has; or, for predictions, after the last
that any rank has.

A rank that still has a batch when another has none would wait in the tables' exchange forever.
Ranks compare the lengths of sized loaders once, and the states of other loaders before every batch.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_distrec._compat.lightning_data import predict_again, replace_predictions
from lightning_distrec._compat.patches import Patches
from lightning_distrec.errors import DataError
from lightning_distrec.ranks import Ranks

UnevenInputs = Literal["stop", "error"]
Repeats = Literal["no", "last", "empty"]
"""What a rank gets that has had its batches, while other ranks have some: nothing; its last one;
that, or None."""
FAILED = 0
ENDED = 1
HAS_BATCH = 2
"""What a loader gives when it is asked for a batch; the minimum over ranks decides."""


def even(
    loader: Any,
    ranks: Ranks,
    mode: UnevenInputs,
    warn: Callable[[str], None],
    repeats: Repeats = "no",
) -> Any:
    """Collective. Return a loader that gives the same number of batches on every rank, `loader`
    itself if it does.

    repeats: whether ranks with fewer batches get `Repeated` ones, instead of all ranks stopping.
    Raises DataError on every rank: the lengths differ and mode is "error"; a rank has no batch at
    all.
    """
    if ranks.num_ranks == 1:
        return loader
    # The length of anything but a DataLoader over a map-style dataset may be an estimate.
    is_exact = isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
    gathered = ranks.all_gather((sized_len(loader), is_exact))
    lengths = [length for length, _ in gathered]
    sizes = [length for length in lengths if length is not None]
    end = EndPolicy(ranks, mode, warn)
    all_exact = None not in lengths and all(is_exact for _, is_exact in gathered)
    if not all_exact and repeats != "no" and mode == "stop":
        return RepeatingLoader(loader, None, end, repeats)
    if not all_exact:
        return EvenLoader(loader, end, None if None in lengths else min(sizes))
    if len(set(sizes)) == 1:
        return loader
    text = f"the ranks have {', '.join(map(str, sizes))} batches of {type(loader).__name__}"
    if mode == "error":
        raise DataError(
            f"{text}, and uneven_inputs='error'. Give each rank as many, or set "
            "uneven_inputs='stop'."
        )
    if min(sizes) == 0 and repeats != "empty":
        raise DataError(f"{text}: none that all of them have. Give every rank at least one batch.")
    if repeats != "no":
        return RepeatingLoader(loader, max(sizes), end, repeats)
    warn(f"{text}; all stop after {min(sizes)} (uneven_inputs='stop').")
    return ShortenedLoader(loader, min(sizes))


def _with_attributes(kind: type, attributes: dict[str, Any]) -> Any:
    wrapper: Any = object.__new__(kind)
    vars(wrapper).update(attributes)
    return wrapper


class Wrapper:
    """A loader around another one, which has all other attributes: sampler, dataset, state for
    resuming."""

    _attributes: tuple[str, ...] = ("end", "agrees", "length", "repeats")
    """Attributes of the wrappers; all others are the loader's."""

    def __init__(self, loader: Any) -> None:
        # Past our own __setattr__, which would hand the attributes on to the loader.
        object.__setattr__(self, "_loader", loader)
        # isinstance checks of Lightning's Protocol of stateful loaders pass over __getattr__ since
        # Python 3.12.
        for name in ("state_dict", "load_state_dict"):
            if hasattr(loader, name):
                object.__setattr__(self, name, getattr(loader, name))

    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> type[Any]:
        """The loader's, for isinstance in the user's hooks; `type` is the wrapper's."""
        return vars(self)["_loader"].__class__  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle is refused where __class__ is not the class that it makes.
        return _with_attributes, (type(self), vars(self))

    def _begin_late(self) -> Iterator[Any]:
        """Return the loader's batches; it begins, and draws seeds of workers, with the first
        one."""
        # A stateful loader that trains has `epochs`, which begin as before a resumed run.
        yield from vars(self).get("epochs", self._loader)

    def __getattr__(self, name: str) -> Any:
        # copy.deepcopy asks the instance for __deepcopy__: the loader's own would return a copy
        # without this wrapper.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(object.__getattribute__(self, "_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._attributes:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class CountedLoader(Wrapper):
    """A wrapper with a number of batches of its own; None: it is not known on some rank."""

    length: int | None

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some rank")
        return self.length


class ShortenedLoader(CountedLoader):
    """The first `length` batches of a sized loader."""

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self.length)


@dataclass(frozen=True)
class EndPolicy:
    """What happens where the ranks' batches end at different places, or a rank's loader fails.

    mode: whether ranks that have more stop, or all raise. warn: called where they stop.
    """

    ranks: Ranks
    mode: UnevenInputs
    warn: Callable[[str], None]

    def apply(self, count: int, state: int, failure: Exception | None) -> None:
        """Collective. End the epoch after `count` batches, once not every rank has another one.

        Raises DataError on every rank: one rank's loader failed (it raises its own exception); the
        numbers of batches differ and mode is "error", or a rank has none.
        """
        # Before anything is raised, so that the rank whose loader failed takes part.
        states = self.ranks.all_gather((state, failure and f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (other, reported) in enumerate(states):
            if other == FAILED:
                raise DataError(
                    f"the dataloader of rank {rank} failed at batch {count}: {reported}"
                )
        longer = [rank for rank, (other, _) in enumerate(states) if other == HAS_BATCH]
        if not longer:
            return
        text = f"after {count} batches ranks {longer} have more, the others none"
        if self.mode == "error":
            raise DataError(
                f"{text}, and uneven_inputs='error'. Give each rank as many, or set "
                "uneven_inputs='stop'."
            )
        if count == 0:
            raise DataError(
                f"{text}: there is no batch that all ranks have. Give every rank at least one "
                "batch."
            )
        self.warn(f"{text}; all stop here (uneven_inputs='stop').")


@dataclass(frozen=True)
class Repeated:
    """A rank's last batch again, None if it has had none: other ranks have one, and wait for this
    rank's exchanges."""

    batch: Any


class RepeatingLoader(CountedLoader):
    """All batches of a loader, and then `Repeated` ones while any rank has batches.

    length: the largest of any rank; None: it is not known, ranks agree on each batch, and iterating
    is collective. Iterating raises DataError as `EndPolicy` does; under repeats="empty" a rank may
    have no batch.
    """

    def __init__(self, loader: Any, length: int | None, end: EndPolicy, repeats: Repeats) -> None:
        super().__init__(loader)
        self.length = length
        self.end = end
        self.repeats = repeats

    def __iter__(self) -> Iterator[Any]:
        batches = self._begin_late()
        last = None
        count = 0
        while self.length is None or count < self.length:
            state, batch, failure = draw_next(batches)
            if self.length is None:
                states = self.end.ranks.all_gather(state)
                has_none = count == 0 and ENDED in states and self.repeats != "empty"
                if FAILED in states or has_none:
                    self.end.apply(count, state, failure)
                if HAS_BATCH not in states:
                    return
            elif failure is not None:
                raise failure
            last = batch if state == HAS_BATCH else last
            yield batch if state == HAS_BATCH else Repeated(last)
            count += 1


class EvenLoader(CountedLoader):
    """A loader without an exact length; the ranks agree before each batch that all of them have
    one.

    Iterating over it is collective: a callback that looks at batches on one rank only must take the
    loader from its own datamodule instead. length: the minimum over ranks of what the loaders say;
    None: some say nothing.
    """

    def __init__(self, loader: Any, end: EndPolicy, length: int | None = None) -> None:
        super().__init__(loader)
        self.end = end
        self.length = length
        self.agrees = True
        """Whether iterators that begin now agree on their end; false where the fetcher of the
        batches does it."""

    def __iter__(self) -> Iterator[Any]:
        """Collective. Return batches while every rank has one. Raises DataError as `EndPolicy`
        does."""
        # Decided when the iterator begins: the fetcher resets `agrees` as soon as all iterators
        # exist.
        # One that fails to start fails at the first batch, where all ranks learn of it.
        batches = self._begin_late()
        return self._agreed(batches) if self.agrees else batches

    def _agreed(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        while True:
            state, batch, failure = draw_next(batches)
            # A batch of this rank is left out where another rank has none, and would never join its
            # lookups.
            if self.end.ranks.all_reduce_min(state) < HAS_BATCH:
                self.end.apply(count, state, failure)
                return
            count += 1
            yield batch


def draw_next(batches: Iterator[Any]) -> tuple[int, Any, Exception | None]:
    """Return what a loader gives next: FAILED, ENDED or HAS_BATCH, the batch, the failure."""
    try:
        return HAS_BATCH, next(batches), None
    except StopIteration:
        return ENDED, None, None
    except Exception as failure:
        return FAILED, None, failure


def choose_repeats(trainer: Trainer, strategy: Any) -> Repeats:
    """Return what ranks get that have had their batches."""
    # A step that draws its batches itself would take a repeated one for one of its own.
    step = trainer.lightning_module.predict_step
    if not trainer.predicting or "dataloader_iter" in inspect.signature(step).parameters:
        return "no"
    return "empty" if _predicts_alone(strategy, trainer.lightning_module) else "last"


def _predicts_alone(strategy: Any, module: nn.Module) -> bool:
    """Return whether predict_step exchanges nothing. Tables that an earlier run has sharded
    exchange rows in it."""
    # By name: what defines the class imports torchrec, which other strategies do without.
    return strategy.predicts_alone and all(
        kind.__name__ != "ShardedProxy"
        for child in module.modules()
        for kind in type(child).__mro__
    )


def join_predictions(trainer: Trainer, strategy: Any) -> Patches:
    """Let a rank run its last batch again for other ranks' batches: no hook is called, and no
    result is kept."""

    def take_part(repeated: Repeated, batch_idx: int, dataloader_idx: int) -> None:
        """Collective, with the predict_step of ranks that have a batch."""
        if _predicts_alone(strategy, trainer.lightning_module):
            with strategy.evaluation_step():  # in which ranks agree to stop
                return
        predict_again(trainer, repeated.batch, batch_idx, dataloader_idx)

    return replace_predictions(trainer, Repeated, take_part)
