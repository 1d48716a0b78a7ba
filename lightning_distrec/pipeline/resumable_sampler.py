"""A sampler that starts in the middle of an epoch: the entries of another sampler that were not trained yet."""

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

State = dict[str, Any]
"""A position in plain types and a tensor: batches that this rank was given, samples (entries) that all ranks were given
in total, `ResumableSampler.layout`, and `ResumableSampler.origin`, from which the order of the epoch is made."""


class ResumableSampler:
    """What a DataLoader draws from in place of its own sampler: the entries of that one, from `start` on.

    `order` is how the order of all ranks' entries is made, so that other ranks can make it too; None if each rank has
    an order of its own.
    """

    def __init__(self, sampler: Any, rank: int, num_ranks: int) -> None:
        self.base = sampler
        self.in_batches = _iterates_as(sampler, BatchSampler)
        self.entries = sampler.sampler if self.in_batches else sampler
        own = getattr(self.entries, "generator", None)
        self.generator = own if isinstance(own, torch.Generator) else torch.default_generator
        distributed = [
            kind for kind in (DistributedSampler, DistributedSamplerWrapper) if _iterates_as(self.entries, kind)
        ]
        self.is_distributed = bool(distributed)
        self.rank, self.num_ranks, self.order = rank, num_ranks, _order_of_one(self.entries) if num_ranks == 1 else None
        if self.is_distributed:
            self.rank, self.num_ranks, self.order = (
                self.entries.rank,
                self.entries.num_replicas,
                distributed[0].__name__,
            )
        self.start: State | None = None
        self.origin: State = {}

    def layout(self) -> State:
        """Return how entries are distributed over ranks: rank, number of ranks, batch size, length, what is dropped."""
        return {
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "batch_size": self.base.batch_size if self.in_batches else 1,
            "length": len(self.entries.dataset) if self.is_distributed else len(self.entries) * self.num_ranks,
            "drop_last": bool(self.in_batches and self.base.drop_last),
            "drop_uneven": bool(self.is_distributed and self.entries.drop_last),
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        # Nothing is done before the first entry is drawn: torch makes this iterator twice where there are workers.
        batches = self.base
        if self.start is None:
            of_epoch = (self.entries.epoch, self.entries.seed, self.entries.shuffle) if self.is_distributed else None
            self.origin = {"order": self.order, "generator": self.generator.get_state(), "of_epoch": of_epoch}
        else:
            self.origin = {name: self.start[name] for name in ("order", "generator", "of_epoch")}
            batches = rest = self._rest(self.start)
            if self.in_batches:
                batches = copy.copy(self.base)
                batches.sampler = rest
        yield from batches

    def _rest(self, start: State) -> Any:
        """Return this rank's entries after those that were trained."""
        if start["order"] is None or (start["order"] == self.order and not self.is_distributed):
            with torch.random.fork_rng(devices=[]):
                self.generator.set_state(start["generator"])  # a generator of its own is not reset
                own = iter(self.entries)
                deque(islice(own, start["samples"] // self.num_ranks), maxlen=0)
            return own
        order = self._full_order(start)
        rest = order[start["samples"] :]
        uneven = len(rest) % self.num_ranks
        if start["drop_uneven"]:
            del rest[len(rest) - uneven :]
        elif uneven:
            rest += [order[i % len(order)] for i in range(self.num_ranks - uneven)]  # as DistributedSampler does
        return rest[self.rank :: self.num_ranks]

    def _full_order(self, start: State) -> list[Any]:
        """Return the entries of all ranks in the order of `start`, whose sampler may have been another one."""
        samples: Any = range(start["length"])
        if start["order"] == "SequentialSampler":
            return list(samples)
        if start["order"].startswith("RandomSampler"):
            own = torch.Generator().set_state(start["generator"]) if "(generator)" in start["order"] else None
            sampler: Any = RandomSampler(samples, generator=own)
        else:
            is_ours = start["order"] == "DistributedSamplerWrapper"
            sampler = copy.copy(self.entries) if is_ours else DistributedSampler(samples, num_replicas=1, rank=0)
            sampler.num_replicas, sampler.rank, sampler.drop_last = 1, 0, False
            sampler.num_samples = sampler.total_size = len(samples)
            sampler.epoch, sampler.seed, sampler.shuffle = start["of_epoch"]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(start["generator"])
            return list(sampler)


def _iterates_as(sampler: Any, kind: type[Any]) -> bool:
    return getattr(type(sampler), "__iter__", None) is kind.__iter__


def _order_of_one(sampler: Any) -> str | None:
    """Return the name of the order in which torch's own samplers draw each entry once; None: another sampler."""
    if type(sampler) is SequentialSampler:
        return "SequentialSampler"
    if type(sampler) is not RandomSampler or sampler.replacement or len(sampler) != len(sampler.data_source):
        return None
    return "RandomSampler" if sampler.generator is None else "RandomSampler(generator)"
