"""How a loader with a state of its own begins its epochs: in a run that resumes as in one that
never stopped."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pprint import pformat
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_distrec.errors import DataError
from lightning_distrec.prefetch.loaders import (
    describe_loader,
    is_of,
    is_of_torchdata,
    is_stateful,
    original_loader,
)
from lightning_distrec.strategies.checkpoints.random_numbers import (
    fingerprint,
    generator_states,
    set_generator_states,
)


class LoaderEpochs:
    """The epochs of one loader; each iterator begins one.

    The epoch that continues draws at its beginning what it drew before the checkpoint, and nothing
    of that from the run's random numbers. The epoch after it begins at its beginning, though some
    datasets keep the place that was loaded: `IterableDataset` of datasets, for one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.draws: Mapping[str, Any] | None = None
        """States of the generators when the last epoch began."""
        self._draws_before: Mapping[str, Any] | None = None
        """Those of the epoch that continues, until it does."""
        self._is_checked = True
        """Whether later epochs begin at their beginning."""
        self._loaded = ""
        self._places: set[str] = set()
        """Where the loader was after its first batches in the epoch that continues."""
        self._forget: Callable[[], None] = _nothing

    def resume(self, state: Any, draws: Mapping[str, Any] | None) -> None:
        """Begin as the run that saved `state`, which is about to be loaded. draws: those of the
        epoch that continues; None between epochs."""
        self._draws_before = draws
        self._is_checked = False
        self._loaded = _place(state)
        self._forget = _forget_state(original_loader(self._loader))

    def __iter__(self) -> Iterator[Any]:
        if self._draws_before is not None:
            return self._continued(self._draws_before)
        self.draws = generator_states()
        if self._is_checked:
            return iter(self._loader)
        self._is_checked = True
        return self._from_the_beginning()

    def _continued(self, draws: Mapping[str, Any]) -> Iterator[Any]:
        self._draws_before = None
        self.draws = draws
        states = generator_states()
        set_generator_states(draws)
        batches = iter(self._loader)
        kind = type(original_loader(self._loader))
        is_generator = inspect.isgenerator(batches) or inspect.isgeneratorfunction(kind.__iter__)
        if is_generator:  # it begins, and draws seeds, with its first batch
            batches = chain(list(islice(batches, 1)), batches)
        set_generator_states(states)
        num_workers = getattr(self._loader, "num_workers", 0)
        before = ""
        for number, batch in enumerate(batches, 1):
            if number == 2 and is_generator and fingerprint() != before:
                rank_zero_warn(
                    f"{describe_loader(self._loader)} draws random numbers with each batch, and "
                    "for the first one after resuming others than in the run that is resumed. "
                    "Draw in workers, or from a generator that its state_dict holds."
                )
            if number <= max(1, num_workers):
                self._places.add(_place(self._loader.state_dict()))
            yield batch
            if number == 1:  # after its step
                before = fingerprint()

    def _from_the_beginning(self) -> Iterator[Any]:
        """Begin the epoch after the state was loaded, once more where it begins at that place."""
        if is_of(original_loader(self._loader), "litdata."):
            # Else it stays so until the generator of its batches has ended, and Lightning does not
            # ask for more than its length.
            self._loader.restore = False
        batches = iter(self._loader)
        first = list(islice(batches, 1))
        if not first or self._is_at_loaded_place():
            states = generator_states()
            set_generator_states(self.draws or {})
            self._forget()
            batches = iter(self._loader)
            had_first = bool(first)
            first = list(islice(batches, 1))
            if had_first:
                set_generator_states(states)  # new workers draw a seed that persistent ones do not
            if first and self._is_at_loaded_place():
                raise DataError(
                    f"{describe_loader(self._loader)} begins this epoch where the one that was "
                    "resumed began, and would leave out the batches before. Let its __iter__ use "
                    "what load_state_dict has set once."
                )
        self._places.clear()
        return chain(first, batches)

    def _is_at_loaded_place(self) -> bool:
        return _place(self._loader.state_dict()) in self._places - {self._loaded}


def _place(state: Any) -> str:
    """Return where samples come from next, by a loader's state; torchdata's counts batches,
    too."""
    if isinstance(state, dict) and "_snapshot" in state:
        # Its first batch is an epoch's first one.
        state = state["_snapshot"]["_worker_snapshots"]["worker_0"]
    if isinstance(state, dict) and "fetcher_state" in state:
        state = [state["fetcher_state"], state["dataset_state"]]
    return pformat(state)  # workers' states have their keys in any order


def _forget_state(loader: Any) -> Callable[[], None]:
    """Return what lets torchdata's DataLoader begin as if no state had been loaded."""
    if not isinstance(loader, DataLoader) or not is_of_torchdata(loader):
        return _nothing
    dataset: Any = loader.dataset
    state = copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None

    def forget() -> None:
        if state is not None:
            dataset.load_state_dict(state)
        # New workers get the dataset of this process.
        loader.load_state_dict({})  # type: ignore[attr-defined]

    return forget


def _nothing() -> None:
    """Do nothing."""
