"""The first batches of a DataLoader, looked at without a trace: those that are drawn later are what they would be."""

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
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

DEEPEST = 5
"""How far below a dataset its random generators are looked for, through attributes and containers."""
MOST_PARTS, MOST_OBJECTS = 100, 10_000
"""How many parts of a container, and objects in all, are looked at for that: a dataset's may be its samples."""


def loaders_in(given: Any) -> list[Any]:
    """Return the loaders of what a Trainer takes for dataloaders: one, a CombinedLoader, or containers of them."""
    if isinstance(given, CombinedLoader):
        return loaders_in(given.flattened)
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        return [loader for part in given for loader in loaders_in(part)]
    return [given]


def why_not(loader: Any) -> str:
    """Return why the batches of `loader` cannot be looked at without a trace; "" where they can."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is no DataLoader, and may not begin twice alike"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset, which may not begin twice alike"
    return ""


@contextmanager
def unchanged(*, include_cuda: bool) -> Iterator[None]:
    """Inside of the context the random numbers of torch, numpy and Python may be drawn; it puts them back."""
    with isolate_rng(include_cuda=include_cuda):
        # isolate_rng puts nothing back when what is inside of it raises.
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def first_batches(loader: DataLoader[Any], count: int) -> Generator[Any, None, None]:
    """Yield up to `count` batches of `loader`, made in this process, whatever workers it has; see `why_not`.

    Its sampler stays as it is, for a copy is drawn from; the random generators of its dataset and its collate_fn are
    put back when it is closed or has ended. What else a dataset changes when a sample is taken stays changed. Use it
    inside of `unchanged`.
    """
    fetched: dict[str, Any] = {"collate_fn": loader.collate_fn}
    known = {id(loader.dataset): loader.dataset}  # a copy of the sampler is for the same dataset
    if loader.batch_sampler is not None:
        fetched["batch_sampler"] = copy.deepcopy(loader.batch_sampler, known)
    else:
        fetched |= {"sampler": copy.deepcopy(loader.sampler, known), "batch_size": None}
    with _generators_kept(loader.dataset, loader.collate_fn):
        yield from islice(DataLoader(loader.dataset, generator=torch.Generator(), **fetched), count)


@contextmanager
def _generators_kept(*owners: Any) -> Iterator[None]:
    found = {id(generator): generator for owner in owners for generator in _generators(owner, 0, set())}
    states = [(generator, _state(generator)) for generator in found.values()]
    try:
        yield
    finally:
        for generator, state in states:
            _put_back(generator, state)


def _generators(owner: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the random generators that `owner` leads to; seen: ids of the objects that were looked at."""
    if depth > DEEPEST or id(owner) in seen or len(seen) > MOST_OBJECTS:
        return
    seen.add(id(owner))
    if isinstance(owner, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        yield owner
        return
    parts: Iterable[Any] = ()
    if isinstance(owner, partial):
        parts = (owner.func, *owner.args, *owner.keywords.values())
    elif isinstance(owner, MethodType):
        parts = (owner.__self__,)
    elif type(owner) in (list, tuple):
        parts = owner
    elif type(owner) is dict:
        parts = owner.values()
    elif hasattr(owner, "__dict__") and not isinstance(owner, type):
        parts = vars(owner).values()
    for part in islice(parts, MOST_PARTS):
        yield from _generators(part, depth + 1, seen)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
