"""A DataLoader goes on in the middle of an epoch, with the first batch that was not trained, on any number of ranks.

What was trained is left out among the indices, so that nothing of it is loaded. An entry is what a sampler gives: the
index of a sample, or a whole batch of them where a custom batch sampler makes those in its own way.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_distrec.pipeline.even_batches import ShortenedLoader, Wrapper

State = dict[str, Any]
"""A position in plain types and a tensor: batches that this rank was given, samples (entries) that all ranks together
were, `ResumableSampler.layout`, and `ResumableSampler.origin`, what the order of the epoch is made from."""


def resumable(loader: Any, rank: int, num_ranks: int, say: Callable[[str], None]) -> Any:
    """Return a loader of the same batches whose position Lightning stores in checkpoints.

    `loader` itself where it has a state of its own, or nothing can be left out of it: it is no DataLoader, nor one that
    `even` shortened; it has no length; it reads an IterableDataset. say: told why a position cannot be used.
    """
    torch_loader = vars(loader)["_loader"] if isinstance(loader, ShortenedLoader) else loader
    if not isinstance(torch_loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return loader
    sampler = torch_loader.sampler if torch_loader.batch_sampler is None else torch_loader.batch_sampler
    if sized_len(sampler) is None:  # that of an IterableDataset is one of these
        return loader
    return PositionedLoader(loader, torch_loader, ResumableSampler(sampler, rank, num_ranks), say)


def num_batches(state: State, num_ranks: int, batch_size: int, trained: int = 0) -> int:
    """Return how many batches each rank has of `state`'s epoch after the first `trained` entries of it."""
    left = max(0, state["length"] - trained)
    of_rank = left // num_ranks if state["drop_uneven"] else -(-left // num_ranks)
    return int(of_rank // batch_size if state["drop_last"] else -(-of_rank // batch_size))


def rescaled(progress: int, state: State, num_ranks: int, batch_size: int) -> int:
    """Return what a count of batches becomes elsewhere, so that the rest of the epoch brings it to `num_batches`.

    progress: `state["batches"]`, or a count that is behind it by some batches and stays so. `state["batches"]` becomes
    0 where `state` does not say how that many ranks go on: their epoch begins anew.
    """
    stays = (num_ranks, batch_size) == (state["num_ranks"], state["batch_size"])
    is_own = state["rank"] is not None and (stays or num_ranks == state["num_ranks"] == 1)
    if state["order"] is None and not is_own:
        return progress - state["batches"]
    if stays:
        return progress
    position = num_batches(state, num_ranks, batch_size)
    position -= num_batches(state, num_ranks, batch_size, state["samples"])
    return progress - state["batches"] + position


def states_of_all_ranks(of_ranks: list[list[State]]) -> list[State]:
    """Return the states of the loaders, for any number of ranks; of_ranks: those that each rank has of them.

    Ranks that draw in orders of their own, or batches of unequal size, can go on from their own states only: what is
    returned for those says so. Nothing is returned where a loader of another kind has a state.
    """
    loaders = list(zip(*of_ranks, strict=True))
    if len(of_ranks) == 1 or not all("of_epoch" in states[0] for states in loaders):
        return of_ranks[0] if len(of_ranks) == 1 else []
    alike = [len({state["batch_size"] for state in states}) == 1 for states in loaders]
    orders = [states[0]["order"] if is_alike else None for states, is_alike in zip(loaders, alike, strict=True)]
    return [{**states[0], "order": order, "rank": None} for states, order in zip(loaders, orders, strict=True)]


def adapt_progress(fit_loop: dict[str, Any], num_ranks: int) -> None:
    """Let positions and what Lightning has counted, which ends an epoch, agree for `num_ranks` ranks.

    fit_loop: `checkpoint["loops"]["fit_loop"]`, which is changed. The longest loader counts. Batch sizes are taken to
    stay as they are. A step in which an exception was raised is made again.
    """
    states = [state for state in fit_loop["state_dict"].get("combined_loader", []) if "of_epoch" in state]
    progress = fit_loop["epoch_loop.batch_progress"]
    if not states:
        return
    current = {name: min(count, progress["current"]["processed"]) for name, count in progress["current"].items()}
    undone = progress["current"]["ready"] - current["ready"]
    for state in states:
        state["samples"] -= min(undone, state["batches"]) * state["batch_size"] * state["num_ranks"]
        state["batches"] -= min(undone, state["batches"])
    state = max(states, key=lambda state: num_batches(state, num_ranks, state["batch_size"]))
    batches = rescaled(state["batches"], state, num_ranks, state["batch_size"])
    whole = num_batches(state, num_ranks, state["batch_size"])
    if progress["is_last_batch"] and not undone:
        batches = whole  # also where Trainer(limit_train_batches=...) ended the epoch before
    progress["is_last_batch"] = batches >= whole
    progress["current"] = {name: count + batches - state["batches"] for name, count in current.items()}
    if progress["is_last_batch"]:
        for state in states:
            state.update(batches=0, samples=0)


class ResumableSampler:
    """What a DataLoader draws from in the place of its own sampler: the entries of that one, from `start` on.

    order: how the entries of all ranks come about, if other ranks can be told; None if each rank has its own order.
    """

    def __init__(self, sampler: Any, rank: int, num_ranks: int) -> None:
        self.whole = sampler
        self.in_batches = _iterates_as(sampler, BatchSampler)
        self.entries = sampler.sampler if self.in_batches else sampler
        own = getattr(self.entries, "generator", None)
        self.generator = own if isinstance(own, torch.Generator) else torch.default_generator
        dealt = [kind for kind in (DistributedSampler, DistributedSamplerWrapper) if _iterates_as(self.entries, kind)]
        self.is_dealt = bool(dealt)
        self.rank, self.num_ranks, self.order = rank, num_ranks, _order_of_one(self.entries) if num_ranks == 1 else None
        if self.is_dealt:
            self.rank, self.num_ranks, self.order = self.entries.rank, self.entries.num_replicas, dealt[0].__name__
        self.start: State | None = None
        self.origin: State = {}

    def layout(self) -> State:
        """Return among how many ranks how many entries are dealt, and what becomes of the last ones."""
        return {
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "batch_size": self.whole.batch_size if self.in_batches else 1,
            "length": len(self.entries.dataset) if self.is_dealt else len(self.entries) * self.num_ranks,
            "drop_last": bool(self.in_batches and self.whole.drop_last),
            "drop_uneven": bool(self.is_dealt and self.entries.drop_last),
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        # Nothing is done before the first entry is asked for: torch begins this twice where there are workers.
        batches = self.whole
        if self.start is None:
            of_epoch = (self.entries.epoch, self.entries.seed, self.entries.shuffle) if self.is_dealt else None
            self.origin = {"order": self.order, "generator": self.generator.get_state(), "of_epoch": of_epoch}
        else:
            self.origin = {name: self.start[name] for name in ("order", "generator", "of_epoch")}
            batches = rest = self._rest(self.start)
            if self.in_batches:
                batches = copy.copy(self.whole)
                batches.sampler = rest
        yield from batches

    def _rest(self, start: State) -> Any:
        """Return this rank's entries after those that were drawn."""
        if start["order"] is None or (start["order"] == self.order and not self.is_dealt):
            with torch.random.fork_rng(devices=[]):
                self.generator.set_state(start["generator"])  # one of its own is not set back
                own = iter(self.entries)
                deque(islice(own, start["samples"] // self.num_ranks), maxlen=0)
            return own
        order = self._whole_order(start)
        rest = order[start["samples"] :]
        uneven = len(rest) % self.num_ranks
        if start["drop_uneven"]:
            del rest[len(rest) - uneven :]
        elif uneven:
            rest += [order[i % len(order)] for i in range(self.num_ranks - uneven)]  # as DistributedSampler does
        return rest[self.rank :: self.num_ranks]

    def _whole_order(self, start: State) -> list[Any]:
        """Return the entries of all ranks in the order of `start`, whose sampler may have been another than ours."""
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


class PositionedLoader(Wrapper):
    """A loader whose state is how far its iterator has come, the one that was begun or drawn from last.

    torch_loader: `loader`, or the DataLoader that it shortens. A loaded position is where the next iterator begins, and
    no later one. A position that no batch follows, or of another epoch than a DistributedSampler was told, is the
    beginning of the next epoch. `len` stays that of whole epochs. Only torch's random numbers are drawn again: the
    order of a sampler that uses others is another one after resuming.
    """

    _own = ("torch_loader", "indices", "say", "start", "state")

    def __init__(self, loader: Any, torch_loader: Any, indices: ResumableSampler, say: Callable[[str], None]) -> None:
        super().__init__(loader)
        self.torch_loader, self.indices, self.say = torch_loader, indices, say
        self.start: State | None = None
        self.state = self._beginning()

    def _beginning(self) -> State:
        unknown = {"order": None, "generator": None, "of_epoch": None}
        return {"batches": 0, "samples": 0, **self.indices.layout(), **unknown}

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> State:
        return dict(self.state)

    def load_state_dict(self, state: State) -> None:
        """Let the next iterator begin at `state`, or say why it cannot. Then `state_dict` is where it will begin."""
        reason = self._refusal(state)
        if reason is not None:
            self._begin_anew(reason)
            return
        here = self.indices.layout()
        was = {**state, "drop_last": here["drop_last"], "drop_uneven": here["drop_uneven"]}
        batches = rescaled(state["batches"], was, here["num_ranks"], here["batch_size"])
        self.start = self.state = {**state, **here, "batches": batches}

    def _refusal(self, state: State) -> str | None:
        """Return why `state` does not say where to go on, None if it does."""
        if not self.state.keys() <= state.keys() or (state["samples"] and state["generator"] is None):
            return "the checkpoint does not hold the position of such a dataloader"
        order, here = self.indices.order, self.indices.layout()
        if order is None or state["order"] is None:
            alike = ("rank", "num_ranks", "length") if here["num_ranks"] == 1 else ("rank", "num_ranks", "batch_size")
            goes_on = order == state["order"] and all(here[name] == state[name] for name in alike)
        else:
            wraps = "DistributedSamplerWrapper" in (order, state["order"])
            goes_on = (order == state["order"] or not wraps) and here["length"] == state["length"]
        if goes_on or not state["samples"]:
            return None
        said = "{length} samples on {num_ranks} rank(s) in the order of {order}"
        return f"the checkpoint is of {said.format(**state)}, and now there are {said.format(**here, order=order)}"

    def _begin_anew(self, reason: str) -> None:
        self.say(
            f"resuming in the middle of an epoch: {reason}. So this epoch begins anew, with samples that were trained. "
            "Resume with the same data, sampler, batch_size and number of ranks, or from the end of an epoch."
        )
        self.start, self.state = None, self._beginning()

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, None
        if start is not None and not (start["samples"] and start["batches"] < len(self)):
            start = None
        self.state = start or self._beginning()
        return self._batches(start)

    def _batches(self, start: State | None) -> Iterator[Any]:
        # Begun with the first batch, not before: when Lightning resumes, it begins loaders before it tells samplers
        # the epoch, and before on_train_start, where random numbers may be restored.
        indices = self.indices
        if start and start["of_epoch"] and indices.is_dealt and start["of_epoch"][0] != indices.entries.epoch:
            start = None
        indices.start, indices.origin = start, {}
        with _drawing_from(self.torch_loader, indices):
            with nullcontext() if start is None else torch.random.fork_rng(devices=[]):  # workers' seeds are drawn
                batches = iter(self._loader)
            batches = chain(list(islice(batches, 1)), batches)
        if start is not None and not indices.origin:
            self._begin_anew(f"{type(self.torch_loader).__name__} began its workers before, or draws in its own way")
            start = None
        state = {**(start or self._beginning()), **indices.origin}
        drawn = state["batch_size"] * state["num_ranks"]
        is_shortened = start is not None and self._loader is not self.torch_loader
        for batch in islice(batches, len(self) - state["batches"] if is_shortened else None):
            state = self.state = {**state, "batches": state["batches"] + 1, "samples": state["samples"] + drawn}
            yield batch


@contextmanager
def _drawing_from(loader: DataLoader[Any], indices: ResumableSampler) -> Iterator[None]:
    """Let iterators that begin now draw from `indices`. They keep it; DataLoader itself refuses that it be set."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = getattr(loader, name)
    object.__setattr__(loader, name, indices)
    try:
        yield
    finally:
        object.__setattr__(loader, name, own)


def _iterates_as(sampler: Any, kind: type[Any]) -> bool:
    return getattr(type(sampler), "__iter__", None) is kind.__iter__


def _order_of_one(sampler: Any) -> str | None:
    """Return how a sampler of one rank draws each entry once, if it is torch's; a generator of its own matters."""
    if type(sampler) is SequentialSampler:
        return "SequentialSampler"
    if type(sampler) is not RandomSampler or sampler.replacement or len(sampler) != len(sampler.data_source):
        return None
    return "RandomSampler" if sampler.generator is None else "RandomSampler(generator)"
