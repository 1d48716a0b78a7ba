"""Records the operations of one step that depend on its batch, and on constants, alone.

computed_calls.py repeats them for later batches. Where Python has read a value of a tensor, what
the step does with it is not seen: calls that follow are looked up as they are made.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_distrec._compat.tensors import (
    argument_names,
    storage_key,
    watch_operations,
    written_by,
)
from lightning_distrec._compat.torch import version_of
from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.sources import (
    BatchRoots,
    Path,
    PathSource,
    Source,
    object_at,
    path_text,
)
from lightning_distrec.recorded_step import LIBRARY_OPERATIONS

aten = torch.ops.aten
UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
}
NAMESPACES = ("aten", "prim", "prims", "fbgemm")
"""Of operations without side effects but those in their schemas: repeating them ahead does nothing
else."""
HINTS = {"permuted_lengths_sum", "output_size"}
"""Arguments that give the size of the result, for speed; without them it is computed."""
LARGEST = 2**62
"""torch writes x[:, 2:] with an end of 2**63 - 1."""
COPIED_BYTES = 64 * 2**20
"""A larger held tensor is not copied, and counts as changed once it is written to."""
READS_BATCH = "Python has read a value of the batch before the call, and may have branched on it"


class HeldTensor:
    """A buffer, or another tensor that a module had before the step. read: returns it as it is
    now."""

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        self.name = name
        self.read = read
        self._stamp: Any = None
        self._was_written = False

    def __repr__(self) -> str:
        return self.name

    def keep(self) -> None:
        """Note its value, with which `changed` compares later ones: where a lookup of the step
        first depends on it."""
        if self._stamp is None:
            tensor = self.read()
            self._stamp = _stamp(tensor)
            self._copy = tensor.detach().clone() if tensor.nbytes <= COPIED_BYTES else None

    def was_written(self) -> bool:
        """Whether the module has written to it since, be it the same value."""
        self._was_written |= self._stamp is not None and _stamp(self.read()) != self._stamp
        return self._was_written

    def changed(self) -> bool:
        """Whether it has another value now."""
        tensor = self.read()
        stamp = _stamp(tensor)
        if stamp == self._stamp:
            return False
        self._was_written = True
        if self._copy is None or not isinstance(tensor, Tensor):
            return True
        if not are_equal(tensor, self._copy):
            return True
        # A broadcast of buffers writes to them and changes nothing.
        self._stamp = stamp
        return False


@dataclass(frozen=True)
class Result:
    """One output of a recorded operation."""

    operation: int
    output: int


Input = PathSource | HeldTensor | Tensor | Result
"""A Tensor is one that the step makes of Python numbers: torch.tensor([...])."""
Origin = tuple[Any, ...]
"""Where a number may come from: ("const", value), ("size", path, dim) or ("numel", path)."""


@dataclass
class Number:
    """An integer that is given to an operation. It has come from any of these origins in every step
    so far."""

    origins: frozenset[Origin]


@dataclass
class Operation:
    """One operation that torch has dispatched. storages: of its tensors, in the recorded step."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    storages: frozenset[int]

    @property
    def parts(self) -> list[Any]:
        """Its arguments, without the lists that they are in."""
        return list(_flatten((self.args, self.kwargs)))


@dataclass(eq=False)
class TracedSource(Source):
    """A tensor that operations of the step make of its batch.

    operations: by their place in the recording. recording: the key of their repeated results in
    `BatchRoots.memo`.
    """

    end: Input
    operations: dict[int, Operation]
    recording: object

    @property
    def parts(self) -> list[Any]:
        """What the operations are given, and the end."""
        parts = [self.end]
        for operation in self.operations.values():
            parts += operation.parts
        return parts

    @property
    def paths(self) -> list[Path]:
        """Of the batch's tensors that it is made of."""
        paths = [part.path for part in self.parts if isinstance(part, PathSource)]
        return list(dict.fromkeys(paths))

    def get(self, roots: BatchRoots, ids: Any = None) -> Any:
        """Return it, once the operations were repeated for this batch."""
        return roots.memo[self.recording].value(self.end)


class Recorder:
    """A recording of one step.

    module: whose tensors may be used. objects, roots: of the batch before the step.
    """

    def __init__(self, module: nn.Module, objects: BatchObjects, roots: BatchRoots) -> None:
        self.roots = roots
        self.objects = objects
        self.read_refusal = ""
        """Why nothing is computed ahead any more: Python has read a value."""
        self.has_read_batch = False
        """Whether Python has read a value that is computed of the batch."""
        # Numbers of operations have a meaning within one recording only.
        self._identity = object()
        self._operations: list[Operation] = []
        self._spoiled: dict[int, str] = {}
        """Storage of the batch, or of what is computed, that was written to -> a reason to refuse
        what reads it."""
        self._failure = ""
        self._sources: dict[int, tuple[Tensor, Input]] = {}
        """id of a tensor that can be computed ahead -> it, so that its id stays its own, and where
        it comes from."""
        self._storages: dict[int, str] = {}
        """Storage -> what it is called where writes to it spoil a recording; "" for held
        tensors."""
        # Tensor -> why it cannot be. By identity, since tensors compare element by element; weak,
        # so that activations are freed as usual.
        self._refused: Any = WeakIdKeyDictionary()
        self._origins: dict[int, set[Origin]] = {}
        """Number -> where it may come from."""
        self._random_states = _random_states()
        for tensor, path in objects.tensors_with_paths:
            self._add_input(tensor, path)
        self._add_module(module)

    def _add_input(self, tensor: Tensor, path: Path) -> None:
        self._add(tensor, PathSource(path), path_text(path))
        for dim, size in enumerate(tensor.shape):
            self._origins.setdefault(size, set()).add(("size", path, dim))
        # The number of elements of a vector is its size, which is noted above.
        if tensor.dim() != 1:
            self._origins.setdefault(tensor.numel(), set()).add(("numel", path))

    def _add_module(self, module: nn.Module) -> None:
        for name, weight in module.named_parameters():
            # A step's update changes it after ids were computed of it for the next batch.
            if weight.requires_grad:
                self._refused[weight] = f"it depends on the weight '{name}'"
        for prefix, child in module.named_modules():
            attributes = dict(child.named_buffers(recurse=False))
            attributes |= child.named_parameters(recurse=False)
            attributes |= vars(child)
            for key, value in attributes.items():
                if isinstance(value, Tensor) and not value.requires_grad:
                    name = f"self.{prefix}.{key}" if prefix else f"self.{key}"
                    self._add(value, HeldTensor(name, partial(getattr, child, key)), "")

    def recording(self) -> Any:
        """Return the context of the step."""
        return watch_operations(self._note)

    def note_rows(self, path: str, output: Any) -> None:
        """Note that these tensors are rows of a table."""
        for tensor in _tensors_in(output):
            # ids of tensors are reused: the rows may be where a recorded tensor was before.
            self._sources.pop(id(tensor), None)
            self._refused[tensor] = f"it depends on rows of '{path}'"

    def trace(self, tensor: Tensor) -> TracedSource | str:
        """Return the operations that make a tensor, or why they cannot be repeated ahead."""
        refusal = self.read_refusal or self._failure
        if refusal:
            return refusal
        if self._random_states != _random_states():
            return "Python or numpy has drawn random numbers in the step before the call"
        end = self._source_of(tensor)
        if isinstance(end, str):
            return end
        source = TracedSource(end, self._operations_behind(end), self._identity)
        refusal = self._written_part(source)
        if refusal:
            return refusal
        for part in source.parts:
            if isinstance(part, HeldTensor):
                part.keep()
        return source

    def _operations_behind(self, end: Input) -> dict[int, Operation]:
        needed: dict[int, Operation] = {}
        pending: list[Any] = [end]
        while pending:
            part = pending.pop()
            if isinstance(part, Result) and part.operation not in needed:
                operation = self._operations[part.operation]
                needed[part.operation] = operation
                pending += operation.parts
        return dict(sorted(needed.items()))

    def _written_part(self, source: TracedSource) -> str:
        # A write counts for all that shares the memory, also for operations that have read it
        # before the write.
        for operation in source.operations.values():
            for storage in operation.storages:
                if storage in self._spoiled:
                    return self._spoiled[storage]
        for path in source.paths:
            if not self.objects.is_unwritten(object_at(self.roots, path)):
                return f"{path_text(path)} is changed in place"
        return ""

    def _source_of(self, tensor: Tensor) -> Input | str:
        if id(tensor) in self._sources:
            return self._spoiled.get(storage_key(tensor)) or self._sources[id(tensor)][1]
        return str(self._refused.get(tensor, "it depends on a tensor of unknown origin"))

    def _add(
        self, tensor: Tensor, source: Input, name: str = "a tensor that the step computes"
    ) -> None:
        self._sources.setdefault(id(tensor), (tensor, source))
        self._storages.setdefault(storage_key(tensor), name)

    def _note(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if LIBRARY_OPERATIONS.depth or self._failure:
            return
        try:
            self._note_operation(function, args, kwargs, output)
        except Exception as error:  # the user's step goes on
            self._failure = f"{function} could not be recorded: {type(error).__name__}: {error}"

    def _note_operation(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # Dispatched for what Python has made, by torch.tensor([...]) or from_numpy, before the user
        # gets it: no other operation shows its values.
        if function is aten.lift_fresh.default:
            self._add(output, args[0].detach().clone())
            return
        inputs = _tensors_in((args, kwargs))
        outputs = _tensors_in(output)
        reason = self._refusal(function, inputs)
        # As of Tensor.item or bool(tensor).
        if not outputs and isinstance(output, (bool, int, float)):
            if inputs:
                self._note_read(inputs, reason)
            return
        self._note_writes(function, args, kwargs)
        # An operation in place returns its argument, which keeps its source: by now it is spoiled,
        # or held.
        input_ids = set(map(id, inputs))
        made = [(i, tensor) for i, tensor in enumerate(outputs) if id(tensor) not in input_ids]
        if reason:
            for _, tensor in made:
                self._refused[tensor] = reason
        elif made:
            index = self._record(function, args, kwargs, [*inputs, *outputs])
            for i, tensor in made:
                self._add(tensor, Result(index, i))

    def _note_writes(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _tensors_in(list(written_by(function, args, kwargs))):
            name = self._storages.get(storage_key(tensor))
            # Held tensors have no name, since their values are compared: a broadcast of buffers
            # writes to them.
            if name:
                self._spoiled[storage_key(tensor)] = f"{name} is changed in place"

    def _refusal(self, function: Any, inputs: list[Tensor]) -> str:
        """Return why the results of an operation cannot be computed ahead, or ""."""
        if function.namespace not in NAMESPACES:
            return f"{function} is none of torch's own operations"
        if torch.Tag.nondeterministic_seeded in function.tags:
            return f"{function} draws random numbers"
        if function in UNINITIALIZED:
            return f"{function} is not initialized"
        for tensor in inputs:
            source = self._source_of(tensor)
            if isinstance(source, str):
                return source
        return ""

    def _note_read(self, inputs: list[Tensor], reason: str) -> None:
        reads_batch = not reason and any(map(self._is_of_batch, inputs))
        self.has_read_batch |= reads_batch
        refusal = f"Python has read a value before the call: {reason or 'it is of the module'}"
        self.read_refusal = self.read_refusal or (READS_BATCH if reads_batch else refusal)

    def _is_of_batch(self, tensor: Tensor) -> bool:
        end = self._sources[id(tensor)][1]
        return bool(TracedSource(end, self._operations_behind(end), self._identity).paths)

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> int:
        named = zip(argument_names(function), args, strict=False)
        encoded = [self._encode(name, value) for name, value in named]
        options = {name: self._encode(name, value) for name, value in kwargs.items()}
        storages = frozenset(map(storage_key, tensors))
        self._operations.append(Operation(function, encoded, options, storages))
        return len(self._operations) - 1

    def _encode(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._sources[id(value)][1]
        if name in HINTS:
            return None  # the sum of other lengths in later batches
        if type(value) in (list, tuple):
            return type(value)(self._encode(name, child) for child in value)
        # dims are not sizes: a dim of 1 must not become "the batch size", which is 1 in the first
        # batch by chance.
        if type(value) is not int or value >= LARGEST or "dim" in name:
            return value
        # All origins that fit; a constant always does.
        return Number(frozenset(self._origins.get(value, set()) | {("const", value)}))


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from _flatten(child)
    else:
        yield value


def _tensors_in(value: Any) -> list[Tensor]:
    return [child for child in _flatten(value) if isinstance(child, Tensor)]


def are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, of one type, on one device."""
    is_alike = tensor.dtype == other.dtype and tensor.device == other.device
    return is_alike and torch.equal(tensor, other)


def _stamp(tensor: Any) -> tuple[int, int | None]:
    """Return what is another one once a tensor is replaced or written to."""
    return id(tensor), version_of(tensor) if isinstance(tensor, Tensor) else None


def _random_states() -> tuple[Any, ...]:
    # The words of numpy's generator, as bytes since arrays compare element by element, and the
    # position in them.
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2]
