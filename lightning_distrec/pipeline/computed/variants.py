"""The ways in which a step makes the arguments of one call: one for each outcome of its branches."""

from collections.abc import Iterator
from typing import Any

from lightning_distrec.pipeline.computed.narrowing import OTHER_OPERATIONS, narrow
from lightning_distrec.pipeline.computed.operations import NotReadyError
from lightning_distrec.pipeline.computed.slices import Guard, Slice
from lightning_distrec.pipeline.provenance.sources import BatchRoots, JaggedSource, LookupCall, Source, paths_of

CONFIRMED = 2
"""Recordings in which a variant must be seen before it is used."""
MAX_VARIANTS = 4
MAX_RECORDINGS = 40
"""After which batches that are unlike the recorded ones are looked up as the step calls, and no more is recorded."""


class Variant:
    """One way: where the arguments come from. condition: the guards that must hold, where nothing is computed."""

    def __init__(self, call: LookupCall, condition: Slice | None) -> None:
        self.call = call
        self.condition = condition
        self.num_recordings = 1

    @property
    def slices(self) -> Iterator[Slice]:
        """What is computed."""
        if self.condition is not None:
            yield self.condition
        yield from (source for source in _parts(self.call.arguments) if isinstance(source, Slice))

    @property
    def guards(self) -> list[Guard]:
        """Of all of its slices."""
        return next((of.guards for of in self.slices), [])

    def get(self, roots: BatchRoots) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError, and as `LookupCall.get`."""
        if self.condition is not None:
            self.condition.get(roots)
        return self.call.get(roots)

    def is_another_branch(self, other: "Variant") -> bool:
        """Whether Python has branched otherwise, in a way that is seen before the call."""
        pairs = zip(self.guards, other.guards, strict=False)
        return any(one.is_branch and another.is_branch and one.expected != another.expected for one, another in pairs)

    def narrow(self, other: "Variant") -> str:
        """Learn from another recording. Returns why the two are not the same, or ""."""
        mine, theirs = list(_parts(self.call.arguments)), list(_parts(other.call.arguments))
        pairs: list[Any] = [*zip(mine, theirs, strict=False), (self.condition, other.condition)]
        if len(mine) != len(theirs) or any(type(one) is not type(another) for one, another in pairs):
            return DIFFERENT
        for one, another in pairs:
            if isinstance(one, Slice):
                if reason := narrow(one, another):
                    return reason
            elif one != another:
                return DIFFERENT
        self.num_recordings += 1
        return ""


DIFFERENT = "it is called with another part of the batch than in the first step"


def _parts(sources: tuple[Source, ...]) -> Iterator[Any]:
    for source in sources:
        if isinstance(source, JaggedSource):
            yield source.keys
            for name, field in source.fields:
                yield name
                yield field
        else:
            yield source


class ComputedCall:
    """One call of a table that is not found in the batch, or not in the same place in every step.

    place: how many calls of this table come before it in a step. found: where its arguments were found in the batch of
    the first step, which is looked at first; None: they were not found.
    """

    def __init__(self, path: str, place: int, found: LookupCall | None = None) -> None:
        self.path = path
        self.place = place
        self.refused = ""
        """Why it is not prefetched on this rank."""
        self.is_reported = False
        """Whether all ranks know that one refuses."""
        self._variants: list[Variant] = []
        self._num_recordings = 0
        self._found = found

    def __repr__(self) -> str:
        # Ranks compare it. What they compute differs where they have branched otherwise, or where batches are wider.
        found = () if self._found is None else self._found.arguments
        return f"{self.path} {self.place} {[paths_of(source) for source in found]}"

    def __str__(self) -> str:
        return ", ".join(sorted({slice_.last_operation for variant in self._variants for slice_ in variant.slices}))

    @property
    def arguments(self) -> tuple[Source, ...]:
        """Where the arguments come from, in all variants."""
        if self._found is not None:
            return self._found.arguments
        return tuple(source for variant in self._variants for source in variant.call.arguments)

    def learn(self, recorded: Variant | str) -> None:
        """Learn from a recording of this call, or from the reason why there is none."""
        if self.refused:
            return
        self._num_recordings += 1
        if isinstance(recorded, str):
            self.refused = recorded
            return
        reason = ""
        for variant in self._variants:
            if variant.is_another_branch(recorded):
                continue
            found = variant.narrow(recorded)
            if not found:
                return
            # A number that Python has read and that no operation was given may have decided.
            has_read = any(not guard.is_branch for guard in (*variant.guards, *recorded.guards))
            if not (has_read and found in (DIFFERENT, OTHER_OPERATIONS)):
                reason = found
        if reason:
            self.refused = reason
        elif len(self._variants) < MAX_VARIANTS:
            self._variants.append(recorded)

    @property
    def can_learn(self) -> bool:
        """Whether another recording may help."""
        return not self.refused and self._num_recordings < MAX_RECORDINGS

    def get(self, roots: BatchRoots, confirmed: int = CONFIRMED) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError, or why the last variant cannot be computed."""
        failure: Exception = NotReadyError(self.refused or "it was not recorded often enough")
        if self._found is not None:
            try:
                return self._found.get(roots)
            except Exception as error:  # another width
                failure = error
        for variant in () if self.refused else self._variants:
            if variant.num_recordings >= confirmed:
                try:
                    return variant.get(roots)
                except Exception as error:  # another variant may be the right one
                    failure = error
        raise failure
