"""Calls of tables whose input is computed: ways to compute it, one for each outcome of branches, and their trial."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_distrec.prefetch.computed.operations import Guards, NotReadyError
from lightning_distrec.prefetch.computed.slices import OTHER_OPERATIONS, Slice, replaying
from lightning_distrec.prefetch.provenance.same_input import is_same_input
from lightning_distrec.prefetch.provenance.sources import BatchRoots, JaggedSource, LookupCall, Source, paths_of
from lightning_distrec.ranks import Ranks

CONFIRMED = 2
"""Recordings in which a variant must be seen before it is used."""
MAX_VARIANTS = 4
MAX_RECORDINGS = 40
"""After which batches that are unlike the recorded ones are looked up as the step calls, and no more is recorded."""
TRIAL_STEPS = 3
OTHER_PART = "it is called with another part of the batch than in the first step"
IRREGULAR = "the steps do not call it equally often"


def parts_of(sources: Iterable[Source]) -> Iterator[Any]:
    """Yield sources; of KeyedJaggedTensors the keys, and names and sources of the fields."""
    for source in sources:
        if isinstance(source, JaggedSource):
            yield source.keys
            for field in source.fields:
                yield from field
        else:
            yield source


class Variant:
    """One way: where the arguments come from. condition: the guards that must hold, where nothing is computed."""

    def __init__(self, call: LookupCall, condition: Slice | None = None) -> None:
        self.call = call
        self.num_recordings = 1
        self.parts = [condition, *parts_of(call.arguments)]
        self.slices = [part for part in self.parts if isinstance(part, Slice)]
        self.guards: Guards = self.slices[0].guards if self.slices else {}
        """Of all of its slices."""

    def get(self, roots: BatchRoots) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError, and as `LookupCall.get`."""
        if (condition := self.parts[0]) is not None:
            condition.get(roots)
        return self.call.get(roots)

    def is_another_branch(self, other: "Variant") -> bool:
        """Whether Python has branched otherwise, in a way that is seen before the call."""
        pairs = zip(self.guards.values(), other.guards.values(), strict=False)
        return any(
            isinstance(expected, bool) and isinstance(recorded, bool) and expected != recorded
            for expected, recorded in pairs
        )

    def narrow(self, other: "Variant") -> str:
        """Learn from another recording. Returns why the two are not the same, or ""."""
        if list(map(type, self.parts)) != list(map(type, other.parts)):
            return OTHER_PART
        for part, other_part in zip(self.parts, other.parts, strict=True):
            if isinstance(part, Slice):
                if reason := part.narrow(other_part):
                    return reason
            elif part != other_part:
                return OTHER_PART
        self.num_recordings += 1
        return ""


class ComputedCall:
    """One call of a table that is not found in the batch, or not in the same place in every step.

    place: how many calls of this table come before it in a step. batch_call: where its arguments were found in the
    batch of the first step, which is looked at first; None: they were not found.
    """

    def __init__(self, path: str, place: int, batch_call: LookupCall | None = None) -> None:
        self.path = path
        self.place = place
        self.refused = ""
        """Why it is not prefetched on this rank."""
        self.is_reported = False
        """Whether all ranks know that one refuses."""
        self._variants: list[Variant] = []
        self._num_recordings = 0
        self._batch_call = batch_call

    def __repr__(self) -> str:
        # Ranks compare it. What they compute differs where they have branched otherwise, or where batches are wider.
        arguments = () if self._batch_call is None else self._batch_call.arguments
        return f"{self.path} {self.place} {[paths_of(source) for source in arguments]}"

    def __str__(self) -> str:
        return ", ".join(sorted({part.last_operation for variant in self._variants for part in variant.slices}))

    @property
    def arguments(self) -> tuple[Source, ...]:
        """Where the arguments come from, in all variants."""
        if self._batch_call is not None:
            return self._batch_call.arguments
        return tuple(source for variant in self._variants for source in variant.call.arguments)

    def learn(self, recorded: Variant | str) -> None:
        """Learn from a recording of this call, or from the reason why there is none."""
        if self.refused:
            return
        self._num_recordings += 1
        if isinstance(recorded, str):
            self.refused = recorded
            return
        refusal = ""
        for variant in self._variants:
            if variant.is_another_branch(recorded):
                continue
            if not (reason := variant.narrow(recorded)):
                return
            # A number that Python has read and that no operation was given may have decided.
            guards = (*variant.guards.values(), *recorded.guards.values())
            may_branch = any(not isinstance(expected, bool) for expected in guards)
            if not (may_branch and reason in (OTHER_PART, OTHER_OPERATIONS)):
                refusal = reason
        if refusal:
            self.refused = refusal
        elif len(self._variants) < MAX_VARIANTS:
            self._variants.append(recorded)

    @property
    def can_learn(self) -> bool:
        """Whether another recording may help."""
        return not self.refused and self._num_recordings < MAX_RECORDINGS

    def get(self, roots: BatchRoots, confirmed: int = CONFIRMED) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError, or why the last variant cannot be computed."""
        ways: list[LookupCall | Variant] = [] if self._batch_call is None else [self._batch_call]
        if not self.refused:
            ways += [variant for variant in self._variants if variant.num_recordings >= confirmed]
        failure: Exception = NotReadyError(self.refused or "it was not recorded often enough")
        for way in ways:
            try:
                return way.get(roots)
            except Exception as error:  # another width; another variant may be the right one
                failure = error
        raise failure


class Trial:
    """The first steps of a kind: what they compute is recorded and compared before anything is sent ahead.

    paths: tables whose calls are compared, alike on all ranks.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.calls: dict[str, list[ComputedCall]] = {path: [] for path in paths}
        self._num_steps = 0
        self._irregular: set[str] = set()
        """Tables that are not called equally often in all steps."""
        self._ahead: dict[str, list[tuple[Any, ...] | None]] = {}
        """What was computed ahead of the step that is running."""

    @property
    def is_over(self) -> bool:
        """Whether no more steps are recorded for it."""
        return self._num_steps >= TRIAL_STEPS

    def begin_step(self, roots: BatchRoots) -> None:
        """Compute the arguments of the step that begins, to compare them with those that it calls with."""
        roots.memo.clear()
        with replaying():
            self._ahead = {path: [_ahead(call, roots) for call in calls] for path, calls in self.calls.items()}
        roots.memo.clear()

    def compare(self, path: str, place: int, arguments: tuple[Any, ...]) -> None:
        """Compare a call that the step makes now with what was computed ahead of it."""
        for ahead in self._ahead.get(path, [])[place : place + 1]:
            if ahead is None:
                continue
            pairs = zip(arguments, ahead, strict=True)
            if not all(is_same_input(argument, computed, torch.equal) for argument, computed in pairs):
                self.calls[path][place].learn("its input is not what its operations compute ahead of the step")

    def end_step(self, recorded: Mapping[str, Sequence[Variant | str]]) -> None:
        """Learn from the recorded calls of a step: table -> its calls in their order."""
        for path, calls in self.calls.items():
            variants = recorded.get(path, ())
            if not self._num_steps:
                calls += [ComputedCall(path, place) for place in range(len(variants))]
            elif len(variants) != len(calls):
                self._irregular.add(path)
            for call, variant in zip(calls, variants, strict=False):
                call.learn(variant)
        self._num_steps += 1

    def agree(self, ranks: Ranks) -> tuple[list[ComputedCall], dict[str, str]]:
        """Collective. Return the calls that all ranks prefetch, and why others are not: table -> reason."""
        refusals = {path: [call.refused for call in calls] for path, calls in self.calls.items()}
        # Calls can be distinguished by their place only where each step makes as many.
        refusals |= {path: [IRREGULAR for _ in refusals[path]] for path in self._irregular}
        gathered: list[dict[str, list[str]]] = ranks.all_gather(refusals)
        usable: list[ComputedCall] = []
        reasons: dict[str, str] = {}
        for path, calls in self.calls.items():
            rank_reasons = [on_rank[path] for on_rank in gathered]
            if len({len(on_rank) for on_rank in rank_reasons}) > 1:
                rank_reasons = [[IRREGULAR] * len(calls)]
            for call, *refused in zip(calls, *rank_reasons, strict=True):
                if reason := next(filter(None, refused), ""):
                    reasons.setdefault(path, reason)
                    call.refused = call.refused or reason
                else:
                    usable.append(call)
        return usable, reasons


def _ahead(call: ComputedCall, roots: BatchRoots) -> tuple[Any, ...] | None:
    try:
        return call.get(roots, confirmed=1)
    except Exception:  # not known yet, or the step itself will raise it
        return None
