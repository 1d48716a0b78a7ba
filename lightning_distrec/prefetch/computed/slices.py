"""Slices of a recorded step: the operations that lead from its batch to one input of a table, repeated for others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.prefetch.computed.operations import (
    BatchTensor,
    Constant,
    Guards,
    HeldTensor,
    Input,
    NotReadyError,
    Number,
    Operation,
    Origin,
    Result,
    are_equal,
)
from lightning_distrec.prefetch.computed.recorder import Recorder
from lightning_distrec.prefetch.provenance.sources import BatchRoots, Path, object_at

ENOUGH_SHAPES = 8
"""Recordings of unlike shapes, after which a number that has not changed is a constant."""
OTHER_OPERATIONS = "the step does not compute it with the operations of its first step"
Shapes = tuple[tuple[int, ...], ...]


@contextmanager
def replaying() -> Iterator[None]:
    """Compute without gradients, and in the types in which operations were recorded: below autograd and autocast."""
    # Tensors that are made in inference mode do not count writes in place, by which changed inputs are noticed.
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                yield
        else:
            yield


def slice_of(recorder: Recorder, tensor: Tensor | None, guards: Guards) -> "Slice | str":
    """Return the operations that make a tensor of the step that is running, or why they cannot be repeated ahead.

    tensor: None for the guards alone.
    """
    if recorder.failure:
        return recorder.failure
    if recorder.has_drawn():
        return "Python or numpy has drawn random numbers in the step before the call"
    end: Input | str | None = None if tensor is None else recorder.source_of(tensor)
    if isinstance(end, str):
        return end
    pending = [*guards, *_makers(end)]
    needed: set[int] = set()
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            pending += [maker for part in recorder.operations[index].parts for maker in _makers(part)]
    operations = {index: recorder.operations[index] for index in sorted(needed)}
    for storage in [storage for operation in operations.values() for storage in operation.storages]:
        if storage in recorder.spoiled:
            return recorder.spoiled[storage]
    parts = [end, *(part for operation in operations.values() for part in operation.parts)]
    for part in parts:
        if isinstance(part, BatchTensor) and not recorder.is_unwritten(part):
            return f"{part} is changed in place"
    return Slice(operations, parts, end, guards, recorder)


def _makers(part: Any) -> list[int]:
    """Return the operations that make a tensor or number."""
    if isinstance(part, Result):
        return [part.operation]
    return part.reads if isinstance(part, Number) else []


class Slice:
    """Operations that make one input of a table out of a batch.

    operations: by their place in the recording, in its order. parts: of all of them, and end: what they lead to.
    """

    def __init__(
        self,
        operations: dict[int, Operation],
        parts: list[Any],
        end: Input | None,
        guards: Guards,
        recorder: Recorder,
    ) -> None:
        self.operations = operations
        self.end = end
        self.guards = guards
        self.paths: list[Path] = list(dict.fromkeys(part.path for part in parts if isinstance(part, BatchTensor)))
        self._recording = recorder.identity
        self._default_dtype = torch.get_default_dtype()
        self.constants = [part.value for part in parts if isinstance(part, Constant)]
        self.held = {part.name: part for part in parts if isinstance(part, HeldTensor)}
        for held in self.held.values():
            held.keep()
        self.shapes: set[Shapes] = {self._shapes_of(recorder.roots)}

    @property
    def last_operation(self) -> str:
        """The name of the operation that makes the result."""
        return str(self.operations[self.end.operation].function) if isinstance(self.end, Result) else repr(self.end)

    @property
    def reads(self) -> list[int]:
        """The operations whose value may be a number that another operation is given."""
        return [read for number, _ in self.numbers for read in number.reads]

    def narrow(self, other: "Slice") -> str:
        """Keep the origins of numbers that fit in the step of another recording too.

        Returns why the two do not compute the same, or "".
        """
        if changed := self._changed():
            return changed
        if self.form != other.form:
            return OTHER_OPERATIONS
        for name, held in self.held.items():
            if not held.had_same_value(other.held[name]):
                return f"{name} changes"
        if not all(map(are_equal, self.constants, other.constants)):
            return "a tensor that the step makes of Python numbers changes"
        self.shapes |= other.shapes
        places = dict(zip(other.operations, self.operations, strict=True))
        numbers = zip(self.numbers, other.numbers, strict=True)
        return next(
            (reason for (number, reason), (other_number, _) in numbers if not number.narrow(other_number, places)), ""
        )

    @property
    def numbers(self) -> list[tuple[Number, str]]:
        """Its numbers, and for each the reason to refuse it where none of its origins fits."""
        numbers = [
            (part, f"a number that {step.function} is given changes from step to step, and is no size of the batch")
            for step in self.operations.values()
            for part in step.parts
            if isinstance(part, Number)
        ]
        reason = "Python has read a number of the batch before the call, and what for is not known"
        return numbers + [(guard, reason) for guard in self.guards.values() if isinstance(guard, Number)]

    @property
    def form(self) -> list[Any]:
        """Return what is the same in all steps that compute alike: operations and where their inputs come from."""
        places = {index: place for place, index in enumerate(self.operations)}

        def form(part: Any) -> Any:
            if isinstance(part, Result):
                return places[part.operation], part.output
            if isinstance(part, (list, tuple)):
                return [form(child) for child in part]
            return "number" if isinstance(part, Number) else repr(part)

        operations = [
            (step.function, form(step.args), form([*step.kwargs.values()])) for step in self.operations.values()
        ]
        return [operations, form(self.end), [(places[index], form(guard)) for index, guard in self.guards.items()]]

    def _changed(self) -> str:
        """Return which held tensor has changed since the recording, or ""."""
        return next((f"{held.name} changes" for held in self.held.values() if held.changed()), "")

    def _shapes_of(self, roots: BatchRoots) -> Shapes:
        return tuple(tuple(object_at(roots, path).shape) for path in self.paths)

    def get(self, roots: BatchRoots) -> Tensor:
        """Compute it from a batch.

        Raises NotReadyError: what the step will compute is not known; or as its operations do.
        """
        if changed := self._changed():
            raise NotReadyError(changed)
        if len(self.shapes) < ENOUGH_SHAPES and self._shapes_of(roots) not in self.shapes:
            raise NotReadyError("a batch of new shapes")
        replay = _Replay(roots, roots.memo.setdefault(self._recording, {}), roots.memo.setdefault("numbers", {}))
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            for index, operation in self.operations.items():
                replay.run(index, operation)
                if index in self.guards and replay.results[index][0] != replay.value(self.guards[index]):
                    raise NotReadyError("Python has read another value of the batch than before")
            return replay.value(self.end)
        finally:
            torch.set_default_dtype(default_dtype)


class _Replay:
    """The values of one recording for one batch. results: operation -> its outputs. numbers: those of the batch."""

    def __init__(self, roots: BatchRoots, results: dict[int, Any], numbers: dict[Origin, Any]) -> None:
        self.results = results
        self._roots = roots
        self._numbers = numbers

    def run(self, index: int, operation: Operation) -> None:
        """Repeat an operation, unless another slice of the recording has."""
        if index not in self.results:
            options = {name: self.value(part) for name, part in operation.kwargs.items()}
            output = operation.function(*self.value(operation.args), **options)
            self.results[index] = output if isinstance(output, (tuple, list)) else (output,)

    def value(self, part: Any) -> Any:
        """Return the value of what a recorded operation was given."""
        kind = type(part)
        if kind is Result:
            return self.results[part.operation][part.output]
        if kind is BatchTensor:
            return object_at(self._roots, part.path)
        if kind is Number:
            values = {self._number(origin) for origin in part.origins}
            if len(values) != 1:
                raise NotReadyError(f"a number may be any of {sorted(values)}")
            return values.pop()
        if kind is list or kind is tuple:
            return kind(self.value(child) for child in part)
        if kind is HeldTensor:
            return part.read()
        return part.value if kind is Constant else part

    def _number(self, origin: Origin) -> Any:
        if origin[0] == "const":
            return origin[1]
        if origin[0] == "read":
            return self.results[origin[1]][0]
        if origin not in self._numbers:
            item = object_at(self._roots, origin[1])
            if origin[0] == "size":
                item = item.shape[origin[2]] + origin[3]
            self._numbers[origin] = item.numel() if origin[0] == "numel" else item
        return self._numbers[origin]
