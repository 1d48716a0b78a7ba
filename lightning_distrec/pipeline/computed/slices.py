"""Slices of a recorded step: the operations that lead from its batch to one input of a table."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_distrec._compat.tensors import storage_key
from lightning_distrec.pipeline.computed.held_tensors import HeldValue
from lightning_distrec.pipeline.computed.numbers import BatchNumbers
from lightning_distrec.pipeline.computed.operations import (
    BatchTensor,
    Constant,
    HeldTensor,
    Input,
    NotReadyError,
    Number,
    Operation,
    Result,
)
from lightning_distrec.pipeline.computed.recorder import Recorder
from lightning_distrec.pipeline.provenance.sources import BatchRoots, Path, object_at

ENOUGH_SHAPES = 8
"""Recordings of unlike shapes, after which a number that has not changed is a constant."""
Shapes = tuple[tuple[int, ...], ...]


class Guard:
    """A value that Python has read before the call: it may have branched on it.

    operation: that makes the value. expected: what it was, or the number that it has been.
    """

    def __init__(self, operation: int, expected: bool | Number) -> None:
        self.operation = operation
        self.expected = expected

    @property
    def is_branch(self) -> bool:
        """Whether it is true or false, so that both may occur."""
        return isinstance(self.expected, bool)


def guards_of(recorder: Recorder) -> tuple[list[Guard], str]:
    """Return the guards of a call that is made now, and why there are others that cannot be computed ahead, or ""."""
    guards, refusal = [], ""
    for read in recorder.reads:
        if read.operation is None:
            refusal = refusal or f"Python has read a value before the call: {read.reason}"
        elif isinstance(read.value, bool):
            guards.append(Guard(read.operation, read.value))
        elif not read.is_used:
            guards.append(Guard(read.operation, Number(read.origins)))
    return guards, refusal


def slice_of(recorder: Recorder, tensor: Tensor | None, guards: list[Guard]) -> "Slice | str":
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
    todo = [guard.operation for guard in guards]
    if tensor is not None:
        todo += [end.operation] if isinstance(end, Result) else []
        todo += recorder.writers.get(storage_key(tensor), [])
    needed: set[int] = set()
    while todo:
        index = todo.pop()
        if index in needed:
            continue
        needed.add(index)
        operation = recorder.operations[index]
        for storage in operation.storages:
            if storage in recorder.spoiled:
                return recorder.spoiled[storage]
            todo += recorder.writers.get(storage, [])
        todo += _inputs_of(operation)
    for found in [source for index in needed for source in recorder.operations[index].inputs()] + [end]:
        if isinstance(found, BatchTensor) and not recorder.is_unwritten(found):
            return f"{found} is changed in place"
    private = {index for index in needed if any(of in recorder.writers for of in recorder.operations[index].storages)}
    return Slice({index: recorder.operations[index] for index in sorted(needed)}, end, guards, private, recorder)


def _inputs_of(operation: Operation) -> Iterable[int]:
    yield from (source.operation for source in operation.inputs() if isinstance(source, Result))
    for number in operation.numbers():
        yield from number.reads


class Slice:
    """Operations that make one input of a table out of a batch.

    operations: by their place in the recording, in its order. end: what they lead to. private: those that read or
    write a tensor that is written to, so that their results must not be shared with other slices of the recording.
    """

    def __init__(
        self,
        operations: dict[int, Operation],
        end: Input | None,
        guards: list[Guard],
        private: set[int],
        recorder: Recorder,
    ) -> None:
        self.operations = operations
        self.end = end
        self.guards = guards
        self._private = private
        self._recording = recorder.identity
        self._default_dtype = torch.get_default_dtype()
        inputs = [source for operation in operations.values() for source in operation.inputs()]
        inputs += [] if end is None else [end]
        self.held = {of.name: HeldValue(of) for of in inputs if isinstance(of, HeldTensor)}
        self.constants = [of.value for of in inputs if isinstance(of, Constant)]
        self.paths: list[Path] = list(dict.fromkeys(of.path for of in inputs if isinstance(of, BatchTensor)))
        self.shapes: set[Shapes] = {self._shapes_of(recorder.roots)}

    def __repr__(self) -> str:
        return self.text

    @property
    def last_operation(self) -> str:
        """The name of the operation that makes the result."""
        if isinstance(self.end, Result):
            return str(self.operations[self.end.operation].function)
        return repr(self.end)

    @property
    def text(self) -> str:
        """What is the same in all steps that compute alike: operations and where their inputs come from."""
        at = {index: place for place, index in enumerate(self.operations)}

        def of(found: Any) -> str:
            if isinstance(found, Result):
                return f"%{at[found.operation]}.{found.output}"
            if isinstance(found, Number):
                return "n"
            if isinstance(found, (list, tuple)):
                return f"[{', '.join(map(of, found))}]"
            return repr(found)

        lines = [
            f"{operation.function}({', '.join(map(of, [*operation.args, *operation.kwargs.values()]))})"
            for operation in self.operations.values()
        ]
        return "; ".join([*lines, of(self.end), *(str(at[guard.operation]) for guard in self.guards)])

    @property
    def reads(self) -> list[int]:
        """The operations whose value may be a number that another operation is given."""
        return [read for operation in self.operations.values() for of in operation.numbers() for read in of.reads]

    def changed(self) -> str:
        """Return which held tensor has changed since the recording, or ""."""
        return next((reason for held in self.held.values() if (reason := held.changed())), "")

    def get(self, roots: BatchRoots) -> Tensor:
        """Compute it from a batch.

        Raises NotReadyError: what the step will compute is not known; or as its operations do.
        """
        if changed := self.changed():
            raise NotReadyError(changed)
        if len(self.shapes) < ENOUGH_SHAPES and self._shapes_of(roots) not in self.shapes:
            raise NotReadyError("a batch of new shapes")
        shared = roots.memo.setdefault(self._recording, {})
        made: dict[int, Any] = {}
        numbers = roots.memo.setdefault("numbers", BatchNumbers(roots))
        branches = {guard.operation: guard.expected for guard in self.guards}
        with _default_dtype(self._default_dtype):
            for index, operation in self.operations.items():
                if index in shared and index not in self._private:
                    made[index] = shared[index]
                else:
                    output = self._run(operation, roots, made, numbers)
                    made[index] = output if isinstance(output, (tuple, list)) else (output,)
                    if index not in self._private:
                        shared[index] = made[index]
                if index in branches:
                    self._check(branches[index], made[index][0], numbers, made)
            return self._input(self.end, roots, made, numbers)

    def _check(self, expected: bool | Number, value: Any, numbers: BatchNumbers, made: dict[int, Any]) -> None:
        wanted = numbers.value(expected.origins, made) if isinstance(expected, Number) else expected
        if value != wanted:
            raise NotReadyError("Python has read another value of the batch than before")

    def _run(self, operation: Operation, roots: BatchRoots, made: dict[int, Any], numbers: BatchNumbers) -> Any:
        args = [self._input(found, roots, made, numbers) for found in operation.args]
        options = {name: self._input(found, roots, made, numbers) for name, found in operation.kwargs.items()}
        return operation.function(*args, **options)

    def _input(self, found: Any, roots: BatchRoots, made: dict[int, Any], numbers: BatchNumbers) -> Any:
        kind = type(found)
        if kind is Result:
            return made[found.operation][found.output]
        if kind is BatchTensor:
            return object_at(roots, found.path)
        if kind is Number:
            return numbers.value(found.origins, made)
        if kind is list or kind is tuple:
            return kind(self._input(child, roots, made, numbers) for child in found)
        if kind is HeldTensor:
            return found.read()
        return found.value if kind is Constant else found

    def _shapes_of(self, roots: BatchRoots) -> Shapes:
        return tuple(tuple(object_at(roots, path).shape) for path in self.paths)


class _default_dtype:
    """Sets torch's default dtype, where it is another one, inside of the context."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._dtype is not self._before:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        if self._dtype is not self._before:
            torch.set_default_dtype(self._before)
