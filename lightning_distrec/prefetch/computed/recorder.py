"""Records the operations of one step that depend on its batch, and on constants, alone."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_distrec._compat.tensors import argument_names, storage_key, watch_operations, written_by
from lightning_distrec.own_operations import OWN
from lightning_distrec.prefetch.computed.operations import (
    BatchTensor,
    Constant,
    Guards,
    HeldTensor,
    Input,
    Number,
    Operation,
    Origin,
    Result,
    held_tensors,
    tensors_of,
)
from lightning_distrec.prefetch.provenance.batch_objects import BatchObjects
from lightning_distrec.prefetch.provenance.sources import BatchRoots, object_at

aten = torch.ops.aten
UNINITIALIZED = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}
NAMESPACES = ("aten", "prim", "prims", "fbgemm")
"""Of operations without side effects but those in their schemas: repeating them ahead does nothing else."""
HINTS = {"permuted_lengths_sum", "output_size"}
"""Arguments that give the size of the result, for speed; without them it is computed."""
LARGEST = 2**62
"""torch writes x[:, 2:] with an end of 2**63 - 1."""


class Recorder:
    """A recording of one step. Inside of the context that `recording` returns, operations are recorded.

    module: whose tensors may be used. objects: of the batch before the step. roots: that batch.
    """

    def __init__(self, module: nn.Module, objects: BatchObjects, roots: BatchRoots) -> None:
        self.roots = roots
        self.identity = object()
        """Of the recording, whose slices share results."""
        self.operations: list[Operation] = []
        self.read_refusal = ""
        """Why a value that Python has read cannot be computed ahead."""
        self.spoiled: dict[int, str] = {}
        """Storage of the batch, or of what is computed, that was written to -> a reason to refuse what reads it."""
        self.failure = ""
        """Why no more is recorded."""
        self._objects = objects
        self._sources: dict[int, tuple[Tensor, Input]] = {}
        """id of a tensor that can be computed ahead -> it, so that its id stays its own, and where it comes from."""
        self._storages: dict[int, Input] = {}
        self._refused: Any = WeakIdKeyDictionary()
        """Tensor that cannot be -> why not."""
        self._reads: Guards = {}
        self._used: set[int] = set()
        """Reads whose number an operation was given later."""
        self._num_outside = 0
        self._origins = _origins_in(objects)
        self._random = _random_states()
        for tensor, path in objects.tensors_with_paths:
            self._add(tensor, BatchTensor(path))
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                self._refused[weight] = f"it depends on the weight '{name}'"
        for tensor, held in held_tensors(module):
            self._add(tensor, held)

    def recording(self) -> Any:
        """Return the context of the step."""
        return watch_operations(self._note)

    def has_drawn(self) -> bool:
        """Whether Python or numpy has drawn random numbers since this began."""
        (python, numpy), (python_now, numpy_now) = self._random, _random_states()
        return python != python_now or numpy[2] != numpy_now[2] or not np.array_equal(numpy[1], numpy_now[1])

    @property
    def has_read(self) -> bool:
        """Whether Python has read a value."""
        return bool(self._reads or self.read_refusal)

    def guards(self) -> Guards:
        """Return the guards of a call that is made now."""
        reads = {index: value for index, value in self._reads.items() if index not in self._used}
        return {index: Number(value.origins) if isinstance(value, Number) else value for index, value in reads.items()}

    def note_rows(self, path: str, output: Any) -> None:
        """Note that these tensors are rows of a table."""
        for tensor in tensors_of(output):
            self._sources.pop(id(tensor), None)
            self._refused[tensor] = f"it depends on rows of '{path}'"

    def source_of(self, tensor: Tensor) -> Input | str:
        """Return where a tensor comes from, or why it cannot be computed ahead."""
        if id(tensor) in self._sources:
            return self.spoiled.get(storage_key(tensor)) or self._sources[id(tensor)][1]
        if tensor in self._refused:
            return str(self._refused[tensor])
        if tensor.requires_grad or tensor.dtype.is_floating_point or tensor.is_inference():
            return "it depends on a tensor of unknown origin"
        # It may have been made before the step, and be the same in every one: later recordings show that.
        name = f"tensor {self._num_outside} that is neither the batch's nor the module's"
        self._num_outside += 1
        self._add(tensor, HeldTensor(name, lambda: tensor))
        return self._sources[id(tensor)][1]

    def is_unwritten(self, source: BatchTensor) -> bool:
        """Whether a tensor of the batch was not written to since it was fetched."""
        return self._objects.is_unwritten(object_at(self.roots, source.path))

    def _add(self, tensor: Tensor, source: Input) -> None:
        self._sources.setdefault(id(tensor), (tensor, source))
        self._storages.setdefault(storage_key(tensor), source)

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if OWN.depth or self.failure:
            return
        try:
            self._note_operation(function, args, kwargs, output)
        except Exception as error:  # the user's step goes on
            self.failure = f"{function} could not be recorded: {type(error).__name__}: {error}"

    def _note_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if function is aten.lift_fresh.default:  # what Python has made: torch.tensor([...]), from_numpy
            self._note_constant(args[0], output)
            return
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(output)
        reason = self._refusal(function, inputs)
        if not outputs and isinstance(output, (bool, int, float)):
            if inputs:
                self._note_read(function, args, kwargs, output, reason)
            return
        for tensor in tensors_of(list(written_by(function, args, kwargs))):
            source = self._storages.get(storage_key(tensor))
            # Values of held tensors are compared: a broadcast of buffers writes to them.
            if source is not None and not isinstance(source, HeldTensor):
                self.spoiled[storage_key(tensor)] = f"{source} is changed in place"
        made = [(i, tensor) for i, tensor in enumerate(outputs) if not any(tensor is argument for argument in inputs)]
        if made and not reason:
            index = self._record(function, args, kwargs, [*inputs, *outputs])
        for i, tensor in made:
            if reason:
                self._refused[tensor] = reason
            else:
                self._add(tensor, Result(index, i))

    def _refusal(self, function: Any, inputs: list[Tensor]) -> str:
        """Return why the results of an operation cannot be computed ahead, or ""."""
        if function.namespace not in NAMESPACES:
            return f"{function} is none of torch's own operations"
        if torch.Tag.nondeterministic_seeded in function.tags:
            return f"{function} draws random numbers"
        if function in UNINITIALIZED:
            return f"{function} is not initialized"
        return next((source for tensor in inputs if isinstance(source := self.source_of(tensor), str)), "")

    def _note_constant(self, value: Tensor, output: Tensor) -> None:
        address = value.data_ptr()
        if address and any(tensor.data_ptr() == address for tensor, _ in self._sources.values()):
            self._refused[output] = "it went through numpy"
        else:
            self._add(output, Constant(value.detach().clone()))

    def _note_read(self, function: Any, args: Any, kwargs: Any, value: Any, reason: str) -> None:
        if reason:
            self.read_refusal = self.read_refusal or f"Python has read a value before the call: {reason}"
            return
        index = self._record(function, args, kwargs, tensors_of((args, kwargs)))
        self._reads[index] = value if isinstance(value, bool) else Number(self._origins_of(value))
        if type(value) is int:
            self._origins.setdefault(value, set()).add(("read", index))

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> int:
        encoded = [self._encode(name, value) for name, value in zip(argument_names(function), args, strict=False)]
        options = {name: self._encode(name, value) for name, value in kwargs.items()}
        self.operations.append(Operation(function, encoded, options, frozenset(map(storage_key, tensors))))
        return len(self.operations) - 1

    def _encode(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._sources[id(value)][1]
        if name in HINTS:
            return None
        if type(value) in (list, tuple):
            return type(value)(self._encode(name, child) for child in value)
        if type(value) is not int or value >= LARGEST or "dim" in name:
            return value
        number = Number(self._origins_of(value))
        self._used.update(number.reads)
        return number

    def _origins_of(self, value: Any) -> frozenset[Origin]:
        """Return all origins that fit; a constant always does."""
        origins = self._origins.get(value, set()) if type(value) is int else set()
        return frozenset(origins | {("const", value)})


def _origins_in(objects: BatchObjects) -> dict[int, set[Origin]]:
    """Return for each number in a batch where it may come from."""
    origins: dict[int, set[Origin]] = {}
    for tensor, path in objects.tensors_with_paths:
        for dim, size in enumerate(tensor.shape):
            for plus in (-1, 0, 1):
                origins.setdefault(size + plus, set()).add(("size", path, dim, plus))
        if tensor.dim() != 1:
            origins.setdefault(tensor.numel(), set()).add(("numel", path))
    for number, path in objects.integers:
        origins.setdefault(number, set()).add(("item", path))
    return origins


def _random_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()
