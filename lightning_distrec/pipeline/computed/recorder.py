"""Records the operations of one step that depend on its batch, and on constants, alone."""

import random
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_distrec._compat.tensors import argument_names, storage_key, watch_operations, written_by
from lightning_distrec.own_operations import OWN
from lightning_distrec.pipeline.computed.held_tensors import held_by, weights_of
from lightning_distrec.pipeline.computed.numbers import LARGEST, NumberOrigins
from lightning_distrec.pipeline.computed.operations import (
    BatchTensor,
    Constant,
    HeldTensor,
    Input,
    Number,
    Operation,
    Read,
    Result,
    tensors_of,
)
from lightning_distrec.pipeline.provenance.batch_objects import BatchObjects
from lightning_distrec.pipeline.provenance.sources import BatchRoots, object_at

_identities = count()
aten = torch.ops.aten
UNINITIALIZED = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}
NAMESPACES = ("aten", "prim", "prims", "fbgemm")
"""Of operations without side effects but those in their schemas: repeating them ahead does nothing else."""
HINTS = {"permuted_lengths_sum", "output_size"}
"""Arguments that give the size of the result, for speed; without them it is computed."""


class Recorder:
    """A recording of one step. Inside of the context that `recording` returns, operations are recorded.

    objects: of the batch before the step. roots: that batch. module: whose tensors may be used.
    """

    def __init__(self, objects: BatchObjects, roots: BatchRoots, module: nn.Module) -> None:
        self.roots = roots
        self.identity = next(_identities)
        """Of the recording, whose slices share results."""
        self.operations: list[Operation] = []
        self.reads: list[Read] = []
        self.known: dict[int, tuple[Tensor, Input]] = {}
        """id of a tensor that can be computed ahead -> it, so that its id stays its own, and where it comes from."""
        self.refused: Any = WeakIdKeyDictionary()
        """Tensor that cannot be -> why not."""
        self.writers: dict[int, list[int]] = {}
        """Storage -> the operations that write to it."""
        self.spoiled: dict[int, str] = {}
        """Storage that was written to with what cannot be computed ahead, or that is the batch's -> why."""
        self.failure = ""
        """Why no more is recorded."""
        self._objects = objects
        self._of_batch: dict[int, str] = {}
        self._computed: set[int] = set()
        self._num_outside = 0
        self._held: set[int] = set()
        self._numbers = NumberOrigins(objects)
        self._random = _random_states()
        for tensor, path in objects.tensors_with_paths:
            self._know(tensor, BatchTensor(path))
            self._of_batch[storage_key(tensor)] = repr(BatchTensor(path))
        for weight, name in weights_of(module):
            self.refused[weight] = f"it depends on the weight '{name}'"
        for tensor, held in held_by(module):
            if id(tensor) not in self.known:
                self._know(tensor, held)
                self._held.add(storage_key(tensor))

    def recording(self) -> Any:
        """Return the context of the step."""
        return watch_operations(self._note)

    def has_drawn(self) -> bool:
        """Whether Python or numpy has drawn random numbers since this began."""
        return not _are_same(self._random, _random_states())

    def note_rows(self, path: str, output: Any) -> None:
        """Note that these tensors are rows of a table."""
        for tensor in tensors_of(output):
            self.known.pop(id(tensor), None)
            self.refused[tensor] = f"it depends on rows of '{path}'"

    def source_of(self, tensor: Tensor) -> Input | str:
        """Return where a tensor comes from, or why it cannot be computed ahead."""
        if self.failure:
            return self.failure
        if (reason := self._refusal(tensor)) is not None:
            return reason
        if id(tensor) not in self.known:
            # It may have been made before the step, and be the same in every one: later recordings show that.
            name = f"tensor {self._num_outside} that is neither the batch's nor the module's"
            self._know(tensor, HeldTensor(name, lambda: tensor))
            self._num_outside += 1
            self._held.add(storage_key(tensor))
        return self.known[id(tensor)][1]

    def is_unwritten(self, source: BatchTensor) -> bool:
        """Whether a tensor of the batch was not written to since it was fetched."""
        return self._objects.is_unwritten(object_at(self.roots, source.path))

    def _refusal(self, tensor: Tensor) -> str | None:
        if id(tensor) in self.known:
            return self.spoiled.get(storage_key(tensor))
        if tensor in self.refused:
            return str(self.refused[tensor])
        if tensor.requires_grad or tensor.dtype.is_floating_point or tensor.is_inference():
            return "it depends on a tensor of unknown origin"
        return None

    def _know(self, tensor: Tensor, source: Input) -> None:
        self.known.setdefault(id(tensor), (tensor, source))

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
        reason = self._why_not(function, inputs)
        if not outputs and isinstance(output, (bool, int, float)):
            if inputs:
                self._note_read(function, args, kwargs, output, reason)
            return
        # Written first: what an operation writes to is one of its inputs.
        written = tensors_of(list(written_by(function, args, kwargs)))
        made = [tensor for tensor in outputs if not any(tensor is given for given in inputs)]
        if not reason:
            index = self._record(function, args, kwargs, [*inputs, *outputs])
        for tensor in written:
            self._note_write(storage_key(tensor), reason, None if reason else index)
        for output_index, tensor in enumerate(outputs):
            if not any(tensor is one for one in made):
                continue
            if reason:
                self.refused[tensor] = reason
            else:
                self.known[id(tensor)] = tensor, Result(index, output_index)
                self._computed.add(storage_key(tensor))

    def _why_not(self, function: Any, inputs: list[Tensor]) -> str:
        """Return why the results of an operation cannot be computed ahead, or ""."""
        if getattr(function, "namespace", "") not in NAMESPACES:
            return f"{function} is none of torch's own operations"
        if torch.Tag.nondeterministic_seeded in function.tags:
            return f"{function} draws random numbers"
        if function in UNINITIALIZED:
            return f"{function} is not initialized"
        for tensor in inputs:
            if isinstance(found := self.source_of(tensor), str):
                return found
        return ""

    def _note_constant(self, given: Tensor, output: Tensor) -> None:
        address = given.data_ptr()
        if address and any(tensor.data_ptr() == address for tensor, _ in self.known.values()):
            self.refused[output] = "it went through numpy"
            return
        self.known[id(output)] = output, Constant(given.detach().clone())
        self._computed.add(storage_key(output))

    def _note_read(self, function: Any, args: Any, kwargs: Any, value: Any, reason: str) -> None:
        index = None if reason else self._record(function, args, kwargs, tensors_of((args, kwargs)))
        self.reads.append(Read(index, value, self._numbers.of(value), reason))
        if type(value) is int and index is not None:
            self._numbers.add(value, ("read", index))

    def _note_write(self, storage: int, reason: str, operation: int | None) -> None:
        if storage in self._of_batch:
            self.spoiled[storage] = f"{self._of_batch[storage]} is changed in place"
        elif storage in self._held:
            return  # its values of several steps are compared
        elif operation is not None:
            self.writers.setdefault(storage, []).append(operation)
        elif storage in self._computed:
            self.spoiled[storage] = reason

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> int:
        encoded = [self._encode(name, value) for name, value in zip(argument_names(function), args, strict=False)]
        options = {name: self._encode(name, value) for name, value in kwargs.items()}
        storages = frozenset(map(storage_key, tensors))
        self.operations.append(Operation(function, encoded, options, storages))
        return len(self.operations) - 1

    def _encode(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.known[id(value)][1]
        if name in HINTS:
            return None
        if type(value) in (list, tuple):
            return type(value)(self._encode(name, child) for child in value)
        if type(value) is int and value < LARGEST and "dim" not in name:
            origins = self._numbers.of(value)
            self._note_use(origins)
            return Number(origins)
        return value

    def _note_use(self, origins: frozenset[Any]) -> None:
        used = {origin[1] for origin in origins if origin[0] == "read"}
        for read in self.reads if used else ():
            read.is_used |= read.operation in used


def _random_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _are_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (python, numpy), (python_now, numpy_now) = one, other
    return python == python_now and numpy[2] == numpy_now[2] and bool(np.array_equal(numpy[1], numpy_now[1]))
