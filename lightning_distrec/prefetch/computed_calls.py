"""Calls of tables whose input a step computes: recorded operations are repeated ahead for later
batches.

The first steps of a kind are a trial: they show which calls are computed alike in all of them. A
call has variants, one for each outcome of branches on values of the batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.prefetch.recorder import (
    Guards,
    HeldTensor,
    Number,
    Operation,
    Origin,
    Result,
    TracedSource,
    are_equal,
)
from lightning_distrec.prefetch.sources import (
    BatchRoots,
    JaggedSource,
    LookupCall,
    PathSource,
    Source,
    object_at,
    paths_of,
)
from lightning_distrec.ranks import Ranks

CONFIRMED = 2
"""Recordings in which a variant must be seen before it is used."""
MAX_VARIANTS = 4
MAX_RECORDINGS = 40
"""After which batches that are unlike the recorded ones are looked up as the step calls, and no
more is recorded."""
TRIAL_STEPS = 3
ENOUGH_SHAPES = 8
"""Recordings of unlike shapes, after which a number that has not changed is a constant."""
OTHER_OPERATIONS = (
    "the step does not compute it with the operations, or of the part of the "
    "batch, of its first step"
)
IRREGULAR = "the steps do not call it equally often"
Shapes = tuple[tuple[int, ...], ...]


class NotReadyError(Exception):
    """This batch's lookups cannot be sent ahead: what the step will compute from it is not known
    yet."""


@contextmanager
def replaying() -> Iterator[None]:
    """Compute without gradients, and in the types in which operations were recorded: below autograd
    and autocast."""
    # Tensors that are made in inference mode do not count writes in place, by which changed inputs
    # are noticed.
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                yield
        else:
            yield


class Replay:
    """The results of one recording's operations for one batch."""

    def __init__(self, roots: BatchRoots) -> None:
        self.results: dict[int, Any] = {}
        self._roots = roots

    def run(self, index: int, operation: Operation) -> None:
        """Repeat an operation, unless another call of the recording has."""
        if index not in self.results:
            options = {name: self.value(part) for name, part in operation.kwargs.items()}
            output = operation.function(*self.value(operation.args), **options)
            self.results[index] = output if isinstance(output, (tuple, list)) else (output,)

    def value(self, part: Any) -> Any:
        """Return the value of what a recorded operation was given."""
        kind = type(part)
        if kind is Result:
            return self.results[part.operation][part.output]
        if kind is PathSource:
            return part.get(self._roots)
        if kind is Number:
            # Never a guess: 8 may be the batch size or a number of buckets until a batch has
            # another size.
            values = {self._number(origin) for origin in part.origins}
            if len(values) != 1:
                raise NotReadyError(f"a number may be any of {sorted(values)}")
            return values.pop()
        if kind is list or kind is tuple:
            return kind(self.value(child) for child in part)
        return part.read() if kind is HeldTensor else part

    def _number(self, origin: Origin) -> Any:
        if origin[0] == "const":
            return origin[1]
        if origin[0] == "read":
            return self.results[origin[1]][0]
        tensor = object_at(self._roots, origin[1])
        return tensor.numel() if origin[0] == "numel" else tensor.shape[origin[2]]


class Variant:
    """One way to make the arguments of a call. computed: what is recorded of them; guards: what
    must hold for it."""

    def __init__(
        self,
        call: LookupCall,
        roots: BatchRoots,
        computed: Sequence[TracedSource] = (),
        guards: Guards | None = None,
    ) -> None:
        self.call = call
        self.num_recordings = 1
        self.guards = guards or {}
        operations = {
            index: step for source in computed for index, step in source.operations.items()
        }
        self.operations = dict(sorted(operations.items()))
        self._recording = computed[0].recording if computed else None
        self._paths = list(dict.fromkeys(path for source in computed for path in source.paths))
        parts = [part for source in computed for part in source.parts]
        self.constants = [part for part in parts if isinstance(part, Tensor)]
        self.held = [part for part in parts if isinstance(part, HeldTensor)]
        self.shapes: set[Shapes] = {self._shapes_of(roots)}
        self._default_dtype = torch.get_default_dtype()

    def _shapes_of(self, roots: BatchRoots) -> Shapes:
        return tuple(tuple(object_at(roots, path).shape) for path in self._paths)

    def get(self, roots: BatchRoots) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError: what the step will compute is not
        known."""
        if changed := self._changed_tensor():
            raise NotReadyError(changed)
        # A number in the recordings may be a size of the batch by chance, so that few shapes prove
        # nothing for another.
        if len(self.shapes) < ENOUGH_SHAPES and self._shapes_of(roots) not in self.shapes:
            raise NotReadyError("a batch of new shapes")
        # Calls of one recording share the results of their operations.
        replay = roots.memo.setdefault(self._recording, Replay(roots))
        # Lightning's precision plugins set another default type inside of the step, in which
        # torch.linspace and others were recorded; batches are prepared outside of it.
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            for index, operation in self.operations.items():
                replay.run(index, operation)
                # Operations behind a branch follow its guard, so that none runs that the step would
                # not have run.
                if index in self.guards and replay.results[index][0] != replay.value(
                    self.guards[index]
                ):
                    raise NotReadyError("Python has read another value of the batch than before")
            return self.call.get(roots)
        finally:
            torch.set_default_dtype(default_dtype)

    def _changed_tensor(self) -> str:
        return next((f"{held.name} changes" for held in self.held if held.changed()), "")

    def narrow(self, other: "Variant") -> str:
        """Keep the origins of numbers that fit in another recording. Returns why the two are not
        the same, or ""."""
        if self.form() != other.form():
            return OTHER_OPERATIONS
        if changed := self._changed_tensor():
            return changed
        if not all(map(are_equal, self.constants, other.constants)):
            return "a tensor that the step makes of Python numbers changes"
        self.shapes |= other.shapes
        # Operations are numbered as their own step has run them. Of equal form, they are in one
        # order.
        places = dict(zip(other.operations, self.operations, strict=True))
        for (number, reason), (other_number, _) in zip(
            self.numbers(), other.numbers(), strict=True
        ):
            number.origins &= {
                ("read", places.get(origin[1])) if origin[0] == "read" else origin
                for origin in other_number.origins
            }
            if not number.origins:
                return reason
        self.num_recordings += 1
        return ""

    def may_branch_otherwise(self, other: "Variant") -> bool:
        """Whether a value that Python has read before the call may be why the other one has other
        operations."""
        values, other_values = list(self.guards.values()), list(other.guards.values())
        # A number that Python has read and that no operation was given may have decided.
        has_number = any(isinstance(value, Number) for value in (*values, *other_values))
        return has_number or any(
            value != other_value for value, other_value in zip(values, other_values, strict=False)
        )

    def numbers(self) -> list[tuple[Number, str]]:
        """Return its numbers, and for each the reason to refuse it where none of its origins
        fits."""
        changes = "a number that {} is given changes from step to step, and is no size of the batch"
        unknown = "Python has read a number of the batch before the call, and what for is not known"
        parts = [
            (part, changes.format(op.function))
            for op in self.operations.values()
            for part in op.parts
        ]
        parts += [(guard, unknown) for guard in self.guards.values()]
        return [(part, reason) for part, reason in parts if isinstance(part, Number)]

    def form(self) -> list[Any]:
        """Return what is the same in all steps that compute alike: operations and where their
        inputs come from."""
        places = {index: place for place, index in enumerate(self.operations)}

        def form(part: Any) -> Any:
            if isinstance(part, TracedSource):
                return ["computed", form(part.end)]
            if isinstance(part, JaggedSource):
                return form([part.keys, part.fields])
            if isinstance(part, Result):
                return places[part.operation], part.output
            if isinstance(part, (list, tuple)):
                return [form(child) for child in part]
            return type(part).__name__ if isinstance(part, (Number, Tensor)) else repr(part)

        operations = [
            (step.function, form([step.args, *step.kwargs.values()]))
            for step in self.operations.values()
        ]
        guards = [(places[i], form(guard)) for i, guard in self.guards.items()]
        return [operations, guards, form(self.call.arguments)]


def computed_in(sources: Sequence[Source]) -> list[TracedSource]:
    """Return the computed ones of sources, and of the fields of KeyedJaggedTensors."""
    fields = [
        field
        for source in sources
        if isinstance(source, JaggedSource)
        for _, field in source.fields
    ]
    return [source for source in (*sources, *fields) if isinstance(source, TracedSource)]


class ComputedCall:
    """One call of a table that is not found in the batch, or not in the same place in every step.

    place: how many calls of this table come before it in a step. batch_call: where its arguments
    were found in the batch of the first step, which is looked at first; None: they were not found.
    """

    def __init__(self, path: str, place: int, batch_call: LookupCall | None = None) -> None:
        self.path, self.place = path, place
        self.refused = ""
        """Why it is not prefetched on this rank."""
        self.is_reported = False
        """Whether all ranks know that one refuses."""
        self._variants: list[Variant] = []
        self._num_recordings = 0
        self._batch_call = batch_call

    def __repr__(self) -> str:
        # Ranks compare it. What they compute differs where they have branched otherwise, or where
        # batches are wider.
        arguments = () if self._batch_call is None else self._batch_call.arguments
        return f"{self.path} {self.place} {[paths_of(source) for source in arguments]}"

    @property
    def arguments(self) -> tuple[Source, ...]:
        """Where the arguments come from, in all variants."""
        if self._batch_call is not None:
            return self._batch_call.arguments
        return tuple(source for variant in self._variants for source in variant.call.arguments)

    def reads_written_tensors(self) -> bool:
        """Whether what it is computed from is written to between steps, or in them."""
        return any(held.was_written() for variant in self._variants for held in variant.held)

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
            if not (reason := variant.narrow(recorded)):
                return
            # Python may have branched: then other operations are another variant. Any other
            # difference is for good.
            if reason != OTHER_OPERATIONS or not variant.may_branch_otherwise(recorded):
                refusal = reason
        if refusal:
            self.refused = refusal
        elif len(self._variants) < MAX_VARIANTS:
            self._variants.append(recorded)

    @property
    def can_learn(self) -> bool:
        """Whether another recording may help."""
        return not self.refused and self._num_recordings < MAX_RECORDINGS

    def get(self, roots: BatchRoots) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError, or why the last variant cannot be
        computed."""
        ways: list[LookupCall | Variant] = [] if self._batch_call is None else [self._batch_call]
        if not self.refused:
            ways += [variant for variant in self._variants if variant.num_recordings >= CONFIRMED]
        failure: Exception = NotReadyError(self.refused or "it was not recorded often enough")
        for way in ways:
            try:
                return way.get(roots)
            except Exception as error:  # another width; another variant may be the right one
                failure = error
        raise failure


class Trial:
    """The first steps of a kind: what they compute is compared before it is sent ahead. paths: of
    the tables."""

    def __init__(self, paths: Sequence[str], order: Sequence[str]) -> None:
        self.order = order
        self.calls: dict[str, list[ComputedCall]] = {path: [] for path in paths}
        self._num_steps = 0

    def end_step(self, recorded: Mapping[str, Sequence[Variant | str]]) -> bool:
        """Learn from the recorded calls of a step: table -> its calls in their order. Return
        whether it is the last."""
        for path, calls in self.calls.items():
            variants = recorded.get(path, ())
            if not self._num_steps:
                calls += [ComputedCall(path, place) for place in range(len(variants))]
            # the n-th call of one step may be another one in the next step
            elif len(variants) != len(calls):
                variants = [IRREGULAR] * len(calls)
            for call, variant in zip(calls, variants, strict=True):
                call.learn(variant)
        self._num_steps += 1
        return self._num_steps == TRIAL_STEPS

    def agree(self, ranks: Ranks) -> tuple[list[ComputedCall], dict[str, str]]:
        """Collective. Return the calls that all ranks prefetch, and why others are not: table ->
        reason."""
        refusals = {path: [call.refused for call in calls] for path, calls in self.calls.items()}
        gathered: list[dict[str, list[str]]] = ranks.all_gather(refusals)
        usable: list[ComputedCall] = []
        reasons: dict[str, str] = {}
        for path, calls in self.calls.items():
            rank_reasons = [on_rank[path] for on_rank in gathered]
            if len({len(on_rank) for on_rank in rank_reasons}) > 1:
                # Ranks have made unequal numbers of calls, and would send ids in exchanges of
                # unequal lookups.
                rank_reasons = [[IRREGULAR] * len(calls)]
            for call, *refused in zip(calls, *rank_reasons, strict=True):
                if reason := next(filter(None, refused), ""):
                    reasons.setdefault(path, reason)
                    call.refused = call.refused or reason
                else:
                    usable.append(call)
        return usable, reasons
