"""Loaders whose state is their own, such as torchdata's, and loaders without one: how they begin, and what is lost."""

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, SequentialSampler

from lightning_distrec._compat.lightning_data import wrapped_sampler
from lightning_distrec.prefetch.even_batches import Wrapper

State = dict[str, Any]


class LateLoader(Wrapper):
    """A loader whose iterators begin, and draw random numbers, with their first batch."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._begin_late()


def is_of_torchdata(value: Any) -> bool:
    return any(kind.__module__.startswith("torchdata.") for kind in type(value).__mro__)


def has_state(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader's own state holds more than a position in its sampler."""
    if not hasattr(loader, "load_state_dict"):
        return False
    # torchdata's loader over a map-style dataset: its state is the sampler's, and that of Lightning's wrapper around
    # the sampler is none, so that it would go on in another order.
    sampler = _entries_of(loader)
    parts = (loader.dataset, loader.batch_sampler, sampler, wrapped_sampler(sampler))
    return not is_of_torchdata(loader) or any(hasattr(part, "state_dict") for part in parts)


def is_stateful(loader: Any) -> bool:
    """Return whether Lightning stores a state of this loader."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def has_position(loader: Any) -> bool:
    """Return whether `loader.state` is a position as position.py has it."""
    return isinstance(state := getattr(loader, "state", None), dict) and "of_epoch" in state


def end_epoch(loader: Any, state: State) -> None:
    """Let torchdata's loader begin its next epoch as it does after one that has ended in `state`."""
    if is_of_torchdata(original_loader(loader)):
        loader.load_state_dict(state)
        iter(original_loader(loader))  # is at the end; the sampler's and the dataset's state is theirs from now on


def loses_order(loader: Any) -> bool:
    """Return whether a loader's own state lacks the order of its sampler, which Lightning has wrapped."""
    original = original_loader(loader)
    sampler = _entries_of(original) if isinstance(original, DataLoader) else None
    is_wrapped = isinstance(sampler, DistributedSamplerWrapper)
    return is_wrapped and not isinstance(wrapped_sampler(sampler), SequentialSampler)


def _entries_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that draws single samples."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def original_loader(loader: Any) -> Any:
    """Return the loader that wrappers of ours are around."""
    while isinstance(loader, Wrapper):
        loader = vars(loader)["_loader"]
    return loader


def describe_loader(loader: Any) -> str:
    """Return the loader's class, and its dataset's."""
    loader = original_loader(loader)
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + ("" if dataset is None else f" over {type(dataset).__name__}")
