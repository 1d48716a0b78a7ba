"""Calls of tables whose input a step computes: recorded operations are repeated for later batches.

The first steps of a kind are a trial: only what all of them compute alike, on all ranks, is
computed ahead. The step's call compares it with what the step has computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.prefetch.recorder import (
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
    Path,
    PathSource,
    Source,
    object_at,
)
from lightning_distrec.ranks import Ranks

TRIAL_STEPS = 3
MANY_SIZES = 3
"""Sizes of a dim in the trial, of all ranks, after which operations are known not to depend on it
but by the numbers that have changed with it."""
OTHER_OPERATIONS = (
    "the step does not compute it with the operations, or of the part of the batch, of its first "
    "step"
)
IRREGULAR = "the steps do not call it equally often"
CHANGING_NUMBER = "a number that {} is given changes from step to step, and is no size of the batch"


class NotReadyError(Exception):
    """This batch's lookups cannot be sent ahead: what the step will compute is not known yet."""


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
            values = set(map(self._number, part.origins))
            if len(values) != 1:
                raise NotReadyError(f"a number may be any of {sorted(values)}")
            return values.pop()
        if kind is list or kind is tuple:
            return kind(map(self.value, part))
        return part.read() if kind is HeldTensor else part

    def _number(self, origin: Origin) -> Any:
        kind, source, *dims = origin
        if kind == "const":
            return source
        tensor = object_at(self._roots, source)
        return tensor.numel() if kind == "numel" else tensor.shape[dims[0]]


class Recording:
    """What makes the arguments of a call in a recorded step."""

    def __init__(self, call: LookupCall) -> None:
        self.call = call
        self.computed = computed_in(call.arguments)
        operations: dict[int, Operation] = {}
        parts: list[Any] = []
        for source in self.computed:
            operations |= source.operations
            parts += source.parts
        self._operations = dict(sorted(operations.items()))
        self.constants = [part for part in parts if isinstance(part, Tensor)]
        self.held = [part for part in parts if isinstance(part, HeldTensor)]
        self.numbers: list[Number] = []
        self._users: list[str] = []
        """Of each number, the operation that is given it."""
        for operation in self._operations.values():
            numbers = [part for part in operation.parts if isinstance(part, Number)]
            self.numbers += numbers
            self._users += [str(operation.function)] * len(numbers)
        self._default_dtype = torch.get_default_dtype()

    def get(self, roots: BatchRoots) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError: a number may be one of two."""
        if not self.computed:
            return self.call.get(roots)
        # Calls of one recording share the results of their operations.
        replay = roots.memo.setdefault(self.computed[0].recording, Replay(roots))
        # Lightning's precision plugins set another default type inside of the step, in which
        # torch.linspace and others were recorded; batches are prepared outside of it.
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            for index, operation in self._operations.items():
                replay.run(index, operation)
            return self.call.get(roots)
        finally:
            torch.set_default_dtype(default_dtype)

    def changed_tensor(self) -> str:
        """Return which tensor of the module has another value than in the recorded step, or ""."""
        for held in self.held:
            if held.changed():
                return f"{held.name} changes"
        return ""

    def narrow(self, other: "Recording") -> str:
        """Keep the origins of numbers that fit in another recording. Returns why the two are not
        the same, or ""."""
        if self.form() != other.form():
            return OTHER_OPERATIONS
        changed = self.changed_tensor()
        if changed:
            return changed
        if not all(map(are_equal, self.constants, other.constants)):
            return "a tensor that the step makes of Python numbers changes"
        return self.keep_origins([number.origins for number in other.numbers])

    def keep_origins(self, origins: list[frozenset[Origin]]) -> str:
        """Keep the origins of each number that are in `origins` too. Returns why there are none."""
        if len(origins) != len(self.numbers):
            return OTHER_OPERATIONS
        for number, other_origins, user in zip(self.numbers, origins, self._users, strict=True):
            number.origins &= other_origins
            if not number.origins:
                return CHANGING_NUMBER.format(user)
        return ""

    def form(self) -> Any:
        """Return what is the same in all steps that compute alike: operations and where their
        inputs come from."""
        # Operations are numbered as their own step has run them.
        places = {index: place for place, index in enumerate(self._operations)}
        operations = list(self._operations.values())
        steps = [[step.function, *step.args, *step.kwargs.values()] for step in operations]
        return _form([steps, self.call.arguments], places)


def _form(part: Any, places: dict[int, int]) -> Any:
    if isinstance(part, TracedSource):
        return ["computed", _form(part.end, places)]
    if isinstance(part, JaggedSource):
        return _form([part.keys, part.fields], places)
    if isinstance(part, Result):
        return places[part.operation], part.output
    if isinstance(part, (list, tuple)):
        return [_form(child, places) for child in part]
    return type(part).__name__ if isinstance(part, (Number, Tensor)) else repr(part)


def computed_in(sources: Sequence[Source]) -> list[TracedSource]:
    """Return the computed ones of sources, and of the fields of KeyedJaggedTensors."""
    computed = []
    for source in sources:
        if isinstance(source, TracedSource):
            computed.append(source)
        elif isinstance(source, JaggedSource):
            computed += computed_in([field for _, field in source.fields])
    return computed


Sizes = dict[tuple[Path, int], set[int]]
"""Dim of a tensor of the batch, by its path -> its sizes in recorded steps."""


def have_known_sizes(roots: BatchRoots, sizes: Sizes) -> bool:
    """Whether each size of a batch is one of the recorded steps, or one of many."""
    # A number that operations are given may be half of a size, which fits only to that size.
    for (path, dim), seen in sizes.items():
        if len(seen) >= MANY_SIZES:
            continue
        try:
            size = object_at(roots, path).shape[dim]
        except (KeyError, IndexError, AttributeError, TypeError):
            return False
        if size not in seen:
            return False
    return True


class ComputedCall:
    """One call of a table of which some calls are computed.

    place: how many calls of this table come before it in a step.
    """

    def __init__(self, path: str, place: int, refused: str = "") -> None:
        self.path = path
        self.place = place
        self.refused = refused
        """Why it is not prefetched."""
        self.is_reported = bool(refused)
        self.recording: Recording | None = None

    @property
    def arguments(self) -> tuple[Source, ...]:
        """Where the arguments come from."""
        return () if self.recording is None else self.recording.call.arguments

    def reads_written_tensors(self) -> bool:
        """Whether what it is computed from is written to between steps, or in them."""
        held = [] if self.recording is None else self.recording.held
        return any(tensor.was_written() for tensor in held)

    def learn(self, recorded: Recording | str) -> None:
        """Learn from a recording of this call, or from the reason why there is none."""
        if self.refused:
            return
        if isinstance(recorded, str):
            self.refused = recorded
        elif self.recording is None:
            self.recording = recorded
        else:
            self.refused = self.recording.narrow(recorded)

    def get(self, roots: BatchRoots) -> tuple[Any, ...]:
        """Return the arguments for a batch. Raises NotReadyError, or what an operation raises."""
        if self.recording is None:
            raise NotReadyError(self.refused)
        # Once it has changed it may change again, after this batch was prepared.
        self.refused = self.refused or self.recording.changed_tensor()
        if self.refused:
            raise NotReadyError(self.refused)
        return self.recording.get(roots)


@dataclass
class TriedCall:
    """What a rank has learned of a call: why it is refused, and where its numbers come from."""

    refused: str
    origins: list[frozenset[Origin]]


class Trial:
    """The first steps of a kind: what they compute is compared before it is sent ahead.

    paths: of the tables.
    """

    def __init__(self, paths: Sequence[str], order: Sequence[str]) -> None:
        self.order = order
        self.calls: dict[str, list[ComputedCall]] = {path: [] for path in paths}
        self.reasons: dict[str, str] = {}
        """Table -> why some of its calls are not prefetched, once ranks have agreed."""
        self.sizes: Sizes = {}
        self._num_steps = 0

    def end_step(
        self, recorded: Mapping[str, Sequence[Recording | str]], tensors: list[tuple[Tensor, Path]]
    ) -> bool:
        """Learn from a step. Return whether it is the last.

        recorded: table -> its calls in their order. tensors: of the step's batch.
        """
        for tensor, tensor_path in tensors:
            for dim, size in enumerate(tensor.shape):
                self.sizes.setdefault((tensor_path, dim), set()).add(size)
        for path, calls in self.calls.items():
            recordings = recorded.get(path, ())
            if self._num_steps == 0:
                calls += [ComputedCall(path, place) for place in range(len(recordings))]
            elif len(recordings) != len(calls):
                # The n-th call of one step may be another one in the next step.
                recordings = [IRREGULAR] * len(calls)
            for call, recording in zip(calls, recordings, strict=True):
                call.learn(recording)
        self._num_steps += 1
        return self._num_steps == TRIAL_STEPS

    def agree(self, ranks: Ranks) -> list[ComputedCall]:
        """Collective. Return the calls that all ranks prefetch, and note why others are not."""
        gathered = ranks.all_gather((self._tried(), self.sizes))
        for _, sizes in gathered:
            for key, seen in sizes.items():
                self.sizes.setdefault(key, set()).update(seen)
        usable: list[ComputedCall] = []
        for path, calls in self.calls.items():
            per_rank = [tried[path] for tried, _ in gathered]
            for place, call in enumerate(calls):
                call.refused = _refusal(call, place, per_rank)
                if call.refused:
                    self.reasons.setdefault(path, call.refused)
                else:
                    usable.append(call)
        return usable

    def _tried(self) -> dict[str, list[TriedCall]]:
        tried: dict[str, list[TriedCall]] = {path: [] for path in self.calls}
        for path, calls in self.calls.items():
            for call in calls:
                numbers = [] if call.recording is None else call.recording.numbers
                tried[path].append(TriedCall(call.refused, [number.origins for number in numbers]))
        return tried


def _refusal(call: ComputedCall, place: int, per_rank: list[list[TriedCall]]) -> str:
    """Return why a call is not prefetched, alike on all ranks; "" if it is."""
    if len(set(map(len, per_rank))) > 1:
        # Ranks would send ids in exchanges of unequal lookups.
        return IRREGULAR
    on_ranks = [tried[place] for tried in per_rank]
    for on_rank in on_ranks:
        if on_rank.refused:
            return on_rank.refused
    assert call.recording is not None
    # What fits on all ranks: they run the same operations, and their sizes count together.
    for on_rank in on_ranks:
        refusal = call.recording.keep_origins(on_rank.origins)
        if refusal:
            return refusal
    return ""
