"""Resumes a DataLoader in the middle of an epoch, at the first batch that was not trained, on any
number of ranks.

Samples that were trained are left out by the sampler, so that they are not loaded. An entry is what
a sampler yields: the index of a sample, or a batch of indices where a custom batch sampler makes
those in its own way.
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
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_distrec._compat.lightning_data import wrapped_sampler
from lightning_distrec.prefetch.even_batches import ShortenedLoader, Wrapper
from lightning_distrec.prefetch.loaders import has_state, is_of_torchdata

State = dict[str, Any]
"""A position in plain types and a tensor: batches that this rank was given, samples (entries) that
all ranks were given in total, `ResumableSampler.layout`, and `ResumableSampler.origin`, from which
the order of the epoch is made."""


class ResumableSampler:
    """What a DataLoader draws from in place of its own sampler: the entries of that one, from
    `start` on.

    `order` is how the order of all ranks' entries is made, so that other ranks can make it too;
    None if each rank has an order of its own.
    """

    def __init__(self, sampler: Any, rank: int, num_ranks: int) -> None:
        self.base = sampler
        # torchdata's subclass differs in that its iterators have a state.
        self.in_batches = _iterates_as(sampler, BatchSampler) or (
            isinstance(sampler, BatchSampler) and is_of_torchdata(sampler)
        )
        self.entries = sampler.sampler if self.in_batches else sampler
        # Lightning's wrapper draws each epoch's order from the user's sampler.
        self.generator = _generator_of(wrapped_sampler(self.entries)) or torch.default_generator
        distributed = []
        for kind in (DistributedSampler, DistributedSamplerWrapper):
            if _iterates_as(self.entries, kind):
                distributed.append(kind)
        self.is_distributed = bool(distributed)
        self.rank = rank
        self.num_ranks = num_ranks
        self.order = _sampler_order(self.entries) if num_ranks == 1 else None
        if distributed:
            self.rank = self.entries.rank
            self.num_ranks = self.entries.num_replicas
            self.order = distributed[0].__name__
        self.start: State | None = None
        self.origin: State = {}

    def layout(self) -> State:
        """Return how entries are distributed over ranks: rank, number of ranks, batch size, length,
        what is dropped."""
        return {
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "batch_size": self.base.batch_size if self.in_batches else 1,
            "length": len(self.entries.dataset)
            if self.is_distributed
            else len(self.entries) * self.num_ranks,
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
        # Nothing is done before the first entry is drawn: torch makes this iterator twice where
        # there are workers.
        batches = self.base
        if self.start is None:
            entries = self.entries
            epoch_settings = (
                (entries.epoch, entries.seed, entries.shuffle) if self.is_distributed else None
            )
            self.origin = {
                "order": self.order,
                "generator": self.generator.get_state(),
                "of_epoch": epoch_settings,
            }
        else:
            self.origin = {name: self.start[name] for name in ("order", "generator", "of_epoch")}
            batches = entries = self._remaining_entries(self.start)
            if self.in_batches:
                batches = copy.copy(self.base)
                batches.sampler = entries
        yield from batches

    def _remaining_entries(self, start: State) -> Any:
        """Return this rank's entries after those that were trained."""
        if start["order"] is None or (start["order"] == self.order and not self.is_distributed):
            with torch.random.fork_rng(devices=[]):
                self.generator.set_state(start["generator"])  # a generator of its own is not reset
                # Trained entries are drawn once more and dropped; the fork restores the global
                # random numbers.
                entries = iter(self.entries)
                deque(islice(entries, start["samples"] // self.num_ranks), maxlen=0)
            return entries
        order = self._full_order(start)
        remaining = order[start["samples"] :]
        uneven = len(remaining) % self.num_ranks
        if start["drop_uneven"]:
            del remaining[len(remaining) - uneven :]
        elif uneven:
            # as DistributedSampler does
            remaining += [order[i % len(order)] for i in range(self.num_ranks - uneven)]
        return remaining[self.rank :: self.num_ranks]

    def _full_order(self, start: State) -> list[Any]:
        """Return the entries of all ranks in the order of `start`, whose sampler may have been
        another one."""
        samples: Any = range(start["length"])
        is_ours = start["order"] == "DistributedSamplerWrapper"
        if start["order"] == "SequentialSampler":
            return list(samples)
        if start["order"].startswith("RandomSampler"):
            # Without one of its own RandomSampler draws a seed from torch's global generator, whose
            # state is set below.
            generator = (
                torch.Generator().set_state(start["generator"])
                if "(generator)" in start["order"]
                else None
            )
            sampler: Any = RandomSampler(samples, generator=generator)
        else:
            sampler = (
                copy.copy(self.entries)
                if is_ours
                else DistributedSampler(samples, num_replicas=1, rank=0)
            )
            sampler.num_replicas = 1
            sampler.rank = 0
            sampler.drop_last = False
            # Its constructor has computed both for the number of ranks.
            sampler.num_samples = sampler.total_size = len(samples)
            sampler.epoch, sampler.seed, sampler.shuffle = start["of_epoch"]
        with torch.random.fork_rng(devices=[]):
            (self.generator if is_ours else torch.default_generator).set_state(start["generator"])
            return list(sampler)


def _iterates_as(sampler: Any, kind: type[Any]) -> bool:
    # A subclass that only adds methods draws in the same order; with an __iter__ of its own the
    # order is unknown.
    return getattr(type(sampler), "__iter__", None) is kind.__iter__


def _sampler_order(sampler: Any) -> str | None:
    """Return the name of the order in which torch's own samplers draw each entry once; None:
    another sampler."""
    if type(sampler) is SequentialSampler:
        return "SequentialSampler"
    if (
        type(sampler) is not RandomSampler
        or sampler.replacement
        or len(sampler) != len(sampler.data_source)
    ):
        return None
    return "RandomSampler" if sampler.generator is None else "RandomSampler(generator)"


def _generator_of(source: Any) -> torch.Generator | None:
    """Return the generator of its own that a sampler or a loader draws from."""
    generator = getattr(source, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def resumable(loader: Any, rank: int, num_ranks: int, warn: Callable[[str], None]) -> Any:
    """Return a loader of the same batches whose position Lightning stores in checkpoints.

    `loader` itself where its dataset or its sampler has a state of its own, or nothing can be left
    out of it: it is no DataLoader, nor one that `even` shortened; it has no length; it reads an
    IterableDataset.
    warn: called with the reason where a position cannot be used.
    """
    torch_loader = vars(loader)["_loader"] if isinstance(loader, ShortenedLoader) else loader
    is_wrapped = isinstance(torch_loader, Wrapper)
    if is_wrapped or not isinstance(torch_loader, DataLoader) or has_state(torch_loader):
        return loader
    sampler = (
        torch_loader.sampler if torch_loader.batch_sampler is None else torch_loader.batch_sampler
    )
    if sized_len(sampler) is None:  # that of an IterableDataset is one of these
        return loader
    return PositionedLoader(loader, torch_loader, ResumableSampler(sampler, rank, num_ranks), warn)


def num_batches(state: State, num_ranks: int, batch_size: int, trained: int = 0) -> int:
    """Return how many batches each rank has of `state`'s epoch after the first `trained` entries of
    it."""
    remaining = max(0, state["length"] - trained)
    per_rank = remaining // num_ranks if state["drop_uneven"] else -(-remaining // num_ranks)
    return int(per_rank // batch_size if state["drop_last"] else -(-per_rank // batch_size))


def rescale(progress: int, state: State, num_ranks: int, batch_size: int) -> int:
    """Return a count of batches for another number of ranks, so that the rest of the epoch brings
    it to `num_batches`.

    progress: `state["batches"]`, or a count that is behind it by some batches and stays so.
    `state["batches"]` becomes 0 where this number of ranks cannot resume from `state`: their epoch
    restarts.
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


def merge_states(rank_states: list[list[State]]) -> list[State]:
    """Return the states of the loaders, from which any number of ranks can resume; rank_states:
    each rank's states.

    Ranks that draw in orders of their own, or batches of unequal size, can resume from their own
    states only: their "order" is None. Nothing is returned where a loader of another kind has a
    state.
    """
    loaders = list(zip(*rank_states, strict=True))
    if len(rank_states) == 1 or not all("of_epoch" in states[0] for states in loaders):
        return rank_states[0] if len(rank_states) == 1 else []
    merged = []
    for states in loaders:
        has_one_size = all(state["batch_size"] == states[0]["batch_size"] for state in states)
        order = states[0]["order"] if has_one_size else None
        merged.append({**states[0], "order": order, "rank": None})
    return merged


def adapt_progress(fit_loop: dict[str, Any], num_ranks: int, num_accumulated: int = 1) -> None:
    """Make positions and Lightning's counts, which end an epoch, consistent for `num_ranks` ranks.

    fit_loop: `checkpoint["loops"]["fit_loop"]`, which is changed. The longest loader counts. Batch
    sizes are assumed to stay as they are. A step in which an exception was raised is repeated, and
    so are the batches whose gradients had been accumulated for a step to come. num_accumulated:
    batches to a step.
    """
    _reopen_epoch(fit_loop)
    states = [
        state for state in fit_loop["state_dict"].get("combined_loader", []) if "of_epoch" in state
    ]
    progress = fit_loop["epoch_loop.batch_progress"]
    if not states:
        return
    processed = progress["current"]["processed"]
    pending = 0 if progress["is_last_batch"] else processed % num_accumulated
    for name in progress["total"]:
        progress["total"][name] -= pending
    current = {name: min(count, processed) - pending for name, count in progress["current"].items()}
    # Lightning counts a batch as ready before its step and as processed after it: the difference is
    # a failed step.
    undone = progress["current"]["ready"] - current["ready"]
    for state in states:
        state["samples"] -= min(undone, state["batches"]) * state["batch_size"] * state["num_ranks"]
        state["batches"] -= min(undone, state["batches"])
    state = max(states, key=lambda state: num_batches(state, num_ranks, state["batch_size"]))
    batches = rescale(state["batches"], state, num_ranks, state["batch_size"])
    full = num_batches(state, num_ranks, state["batch_size"])
    if progress["is_last_batch"] and not undone:
        batches = full  # also where Trainer(limit_train_batches=...) ended the epoch before
    progress["is_last_batch"] = batches >= full
    progress["current"] = {
        name: count + batches - state["batches"] for name, count in current.items()
    }
    if progress["is_last_batch"]:
        for state in states:
            state.update(batches=0, samples=0)


def _reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Let an epoch continue that max_steps, max_time or should_stop has ended: Lightning counts it
    as complete."""
    batches = fit_loop["epoch_loop.batch_progress"]
    epochs = fit_loop["epoch_progress"]
    current = epochs["current"]
    if (
        batches["is_last_batch"]
        or not batches["current"]["ready"]
        or current["processed"] < current["started"]
    ):
        return
    for counts in epochs.values():
        counts["processed"] = counts["completed"] = counts["started"] - 1


class PositionedLoader(Wrapper):
    """A loader whose state is the position of its iterator, the one that was begun or drawn from
    last.

    torch_loader: `loader`, or the DataLoader that it shortens. The next iterator begins at a loaded
    position, later ones do not. A position that no batch follows, or of another epoch than a
    DistributedSampler is set to, is the beginning of the next epoch. `len` stays that of full
    epochs. Only torch's random numbers are restored: the order of a sampler that uses others is
    another one after resuming.
    """

    _attributes = (
        "torch_loader",
        "sampler_in_use",
        "warn",
        "start",
        "state",
        "generators",
        "states_to_set",
    )

    def __init__(
        self,
        loader: Any,
        torch_loader: Any,
        sampler_in_use: ResumableSampler,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(loader)
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)  # torchdata's, in place of which are those below
        self.torch_loader = torch_loader
        self.sampler_in_use = sampler_in_use
        self.warn = warn
        self.start: State | None = None
        self.state = self._beginning()
        generators = (_generator_of(torch_loader), sampler_in_use.generator)
        self.generators = [
            g for g in dict.fromkeys(generators) if g not in (None, torch.default_generator)
        ]
        """Those of the loader, from which workers get seeds, and of the sampler, other than torch's
        global one."""
        self.states_to_set: list[Any] = []

    def _beginning(self) -> State:
        unknown = {"order": None, "generator": None, "of_epoch": None}
        return {"batches": 0, "samples": 0, **self.sampler_in_use.layout(), **unknown}

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> State:
        # Those of a run that has resumed are set with its first batch.
        states = self.states_to_set or [generator.get_state() for generator in self.generators]
        return {**self.state, "next_generators": states}

    def continue_generators(self, state: State) -> None:
        """Let the next iterator draw from where generators of its own were when `state` was taken,
        between epochs."""
        self.states_to_set = state.get("next_generators", [])

    def load_state_dict(self, state: State) -> None:
        """Let the next iterator begin at `state`, or warn why it cannot. Then `state_dict` is where
        it will begin."""
        reason = self._refusal(state)
        if reason is not None:
            self._restart(reason)
            return
        layout = self.sampler_in_use.layout()
        was = {**state, "drop_last": layout["drop_last"], "drop_uneven": layout["drop_uneven"]}
        batches = rescale(state["batches"], was, layout["num_ranks"], layout["batch_size"])
        self.start = self.state = {**state, **layout, "batches": batches}

    def _refusal(self, state: State) -> str | None:
        """Return why it cannot resume from `state`, None if it can."""
        if not self.state.keys() <= state.keys() or (
            state["samples"] and state["generator"] is None
        ):
            return "the checkpoint does not hold the position of such a dataloader"
        order = self.sampler_in_use.order
        layout = self.sampler_in_use.layout()
        if order is None or state["order"] is None:
            compared = ("rank", "num_ranks", "length" if layout["num_ranks"] == 1 else "batch_size")
            can_resume = order == state["order"] and all(
                layout[name] == state[name] for name in compared
            )
        else:
            wraps = "DistributedSamplerWrapper" in (order, state["order"])
            can_resume = (order == state["order"] or not wraps) and layout["length"] == state[
                "length"
            ]
        if can_resume or not state["samples"]:
            return None
        text = "{length} samples on {num_ranks} rank(s) in the order of {order}"
        return (
            f"the checkpoint is of {text.format(**state)}, and now there are "
            f"{text.format(**layout, order=order)}"
        )

    def _restart(self, reason: str) -> None:
        self.warn(
            f"resuming in the middle of an epoch: {reason}. So this epoch restarts, with samples "
            "that were trained. Resume with the same data, sampler, batch_size and number of "
            "ranks, or from the end of an epoch."
        )
        self.start, self.state = None, self._beginning()

    def __iter__(self) -> Iterator[Any]:
        start = self.start
        self.start = None
        if start is not None and not (start["samples"] and start["batches"] < len(self)):
            start = None
        self.state = start or self._beginning()
        return self._batches(start)

    def _batches(self, start: State | None) -> Iterator[Any]:
        # Starts with the first batch, not before: when Lightning resumes, it makes iterators before
        # it sets the samplers' epoch, and before on_train_start, where random numbers may be
        # restored.
        sampler = self.sampler_in_use
        if (
            start
            and start["of_epoch"]
            and sampler.is_distributed
            and start["of_epoch"][0] != sampler.entries.epoch
        ):
            start = None
        sampler.start = start
        sampler.origin = {}
        # A position that continues begins as its epoch began.
        _set_states(
            self.generators,
            self.states_to_set if start is None else start.get("first_generators", []),
        )
        first_generators = [generator.get_state() for generator in self.generators]
        self.states_to_set = []
        with _draw_from(self.torch_loader, sampler):
            # workers' seeds are drawn
            with nullcontext() if start is None else torch.random.fork_rng(devices=[]):
                batches = iter(self._loader)
            # With the first batch: `ResumableSampler.__iter__` runs, and sets `origin`, once it is
            # drawn from.
            batches = chain(list(islice(batches, 1)), batches)
        if start is not None and not sampler.origin:
            self._restart(
                f"{type(self.torch_loader).__name__} started its workers before, or draws in its "
                "own way"
            )
            start = None
        state = {
            **(start or self._beginning()),
            **sampler.origin,
            "first_generators": first_generators,
        }
        drawn = state["batch_size"] * state["num_ranks"]
        is_shortened = start is not None and self._loader is not self.torch_loader
        for batch in islice(batches, len(self) - state["batches"] if is_shortened else None):
            state = self.state = {
                **state,
                "batches": state["batches"] + 1,
                "samples": state["samples"] + drawn,
            }
            yield batch


def _set_states(generators: list[torch.Generator], states: list[Any]) -> None:
    """Set generators, unless there are states of others."""
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _draw_from(loader: DataLoader[Any], sampler: ResumableSampler) -> Iterator[None]:
    """Inside of the context let iterators that begin draw from `sampler`, which they keep."""
    # Past DataLoader's __setattr__, which refuses to replace a sampler: workers may have a copy of
    # it. Here the iterator that starts the workers is made inside of the context.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    replaced = getattr(loader, name)
    object.__setattr__(loader, name, sampler)
    try:
        yield
    finally:
        object.__setattr__(loader, name, replaced)
