"""What is asked of users' loaders: their first batches, without a change to later ones, and the
state of their own."""

import copy
import random
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_distrec._compat.lightning_data import wrapped_sampler
from lightning_distrec.prefetch.even_batches import Wrapper

MAX_DEPTH = 5
"""How far below a dataset its random generators are searched for, through attributes and
containers."""
MAX_CHILDREN = 100
MAX_OBJECTS = 10_000
"""How many children of a container, and objects in total, are searched: they may be a dataset's
samples."""


def loaders_in(loaders: Any) -> list[Any]:
    """Return the loaders of what a Trainer takes for dataloaders: one, a CombinedLoader, or
    containers of them."""
    if isinstance(loaders, CombinedLoader):
        return loaders_in(loaders.flattened)
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [loader for child in loaders for loader in loaders_in(child)]
    return [loaders]


def peek_obstacle(loader: Any) -> str:
    """Return why one cannot peek at the batches of `loader`; "" where one can."""
    if not isinstance(loader, DataLoader):
        return (
            f"a {type(loader).__name__} is no DataLoader, and may not start twice with the same "
            "batches"
        )
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"{type(loader.dataset).__name__} is an IterableDataset, which may not start twice "
            "with the same batches"
        )
    return ""


@contextmanager
def unchanged(*, include_cuda: bool) -> Iterator[None]:
    """Restore the random generators of torch, numpy and Python at the end of the context."""
    with isolate_rng(include_cuda=include_cuda):
        # isolate_rng restores nothing when its context raises.
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def first_batches(loader: DataLoader[Any], count: int) -> Generator[Any, None, None]:
    """Yield up to `count` batches of `loader`, made in this process, whatever workers it has; see
    `peek_obstacle`.

    Its sampler stays as it is, since a copy is drawn from; the random generators of its dataset and
    its collate_fn are restored when this generator is closed or ends. What else a dataset changes
    when a sample is taken stays changed. Use it inside of `unchanged`.
    """
    fetched: dict[str, Any] = {"collate_fn": loader.collate_fn}
    memo = {id(loader.dataset): loader.dataset}  # a copy of the sampler is for the same dataset
    if loader.batch_sampler is not None:
        fetched["batch_sampler"] = copy.deepcopy(loader.batch_sampler, memo)
    else:
        fetched |= {"sampler": copy.deepcopy(loader.sampler, memo), "batch_size": None}
    with _keep_generators(loader.dataset, loader.collate_fn):
        # With a generator, since torch draws a seed for each iterator, by default from its global
        # random numbers.
        yield from islice(DataLoader(loader.dataset, generator=torch.Generator(), **fetched), count)


@contextmanager
def _keep_generators(*roots: Any) -> Iterator[None]:
    generators = {
        id(generator): generator for root in roots for generator in _generators(root, 0, set())
    }
    states = [(generator, _state(generator)) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in states:
            _restore(generator, state)


def _generators(root: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the random generators that `root` leads to; seen: ids of the objects that were
    visited."""
    # A dataset in memory may hold millions of samples: beyond the limits a generator is not found,
    # nor restored.
    if depth > MAX_DEPTH or id(root) in seen or len(seen) > MAX_OBJECTS:
        return
    seen.add(id(root))
    if isinstance(
        root, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    ):
        yield root
        return
    children: Iterable[Any] = ()
    if isinstance(root, partial):
        children = (root.func, *root.args, *root.keywords.values())
    elif isinstance(root, MethodType):
        children = (root.__self__,)
    elif type(root) in (list, tuple):
        children = root
    elif type(root) is dict:
        children = root.values()
    elif hasattr(root, "__dict__") and not isinstance(root, type):
        children = vars(root).values()
    for child in islice(children, MAX_CHILDREN):
        yield from _generators(child, depth + 1, seen)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


State = dict[str, Any]


class LateLoader(Wrapper):
    """A loader whose iterators begin, and draw random numbers, with their first batch."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._begin_late()


def is_of_torchdata(value: Any) -> bool:
    return is_of(value, "torchdata.")


def is_of(value: Any, *packages: str) -> bool:
    """Return whether the class of `value`, or one above it, is of one of the packages."""
    return any(kind.__module__.startswith(packages) for kind in type(value).__mro__)


def has_state(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader's own state holds more than a position in its sampler."""
    if not hasattr(loader, "load_state_dict"):
        return False
    # torchdata's loader over a map-style dataset: its state is the sampler's, and that of
    # Lightning's wrapper around the sampler is none, so that it would go on in another order.
    sampler = _entries_of(loader)
    parts = (loader.dataset, loader.batch_sampler, sampler, wrapped_sampler(sampler))
    return not is_of_torchdata(loader) or any(hasattr(part, "state_dict") for part in parts)


def is_stateful(loader: Any) -> bool:
    """Return whether Lightning stores a state of this loader."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def has_position(loader: Any) -> bool:
    """Return whether `loader.state` is a position as position.py has it."""
    state = getattr(loader, "state", None)
    return isinstance(state, dict) and "of_epoch" in state


def end_epoch(loader: Any, state: State) -> None:
    """Let a loader of torchdata or litdata begin its next epoch as it does after one that has ended
    in `state`."""
    if is_of(original_loader(loader), "torchdata.", "litdata."):
        loader.load_state_dict(state)
        # is at the end; the sampler's and the dataset's state is theirs from now on
        iter(original_loader(loader))


def loses_order(loader: Any) -> bool:
    """Return whether a loader's own state lacks the order of its sampler, which Lightning has
    wrapped."""
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
