"""Where the inputs of a lookup come from: which parts of the batch, found by identity.

A training_step is neither traced nor rewritten. In the first step it runs as it is, and each argument of a lookup is
looked for among the objects of the batch: the very same object, a view of one of its tensors, or a KeyedJaggedTensor
made of them. What was found is built from later batches before their steps begin; when the step comes, identity tells
whether the argument is the one that was foreseen.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.torch import version_of
from lightning_distrec._compat.torchrec import JAGGED_TENSOR_FIELDS, jagged_fields
from lightning_distrec.pipeline.regular import Regular, regular_like

Step = tuple[str, Any]
"""("item", key) or ("attr", name)."""
Path = tuple[Step, ...]
SCALARS = (bool, int, float, str)
DEEPEST = 8
"""Containers within containers that are looked into."""


@dataclass(frozen=True)
class Constant:
    """The same number, text or None in every step."""

    value: Any

    def get(self, batch: Any) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True)
class Part:
    """An object of the batch."""

    path: Path
    also: tuple[Path, ...] = ()
    """Where the same object was found too: which of them the step takes is not known."""

    def get(self, batch: Any) -> Any:
        """Return it.

        Raises KeyError, IndexError, AttributeError or TypeError: this batch has none there; ValueError: it has
        different ones in places where the first batch had one.
        """
        found = _at(batch, self.path)
        if any(_at(batch, path) is not found for path in self.also):
            raise ValueError(f"{name_of(self.path)} was the same as {name_of(self.also[0])}, and is not")
        return found


@dataclass(frozen=True)
class View:
    """A view of a tensor of the batch: a column, a range of columns, or another shape of the same rows."""

    of: Part
    form: str
    """"select", "narrow" or "reshape"."""
    numbers: tuple[int, ...]
    size: tuple[int, ...]
    """Of the dim that is picked from, or of all but the first: in a wider tensor, -1 would be another column."""

    def get(self, batch: Any) -> Tensor:
        """Return it. Raises ValueError: this batch's tensor is wider or narrower."""
        tensor: Tensor = self.of.get(batch)
        now = tensor.shape[1:] if self.form == "reshape" else tensor.shape[self.numbers[0] : self.numbers[0] + 1]
        if tuple(now) != self.size:
            raise ValueError(f"{tuple(now)} in place of {self.size}")
        if self.form == "select":
            return tensor.select(*self.numbers)
        if self.form == "narrow":
            return tensor.narrow(*self.numbers)
        return tensor.view(-1, *self.numbers)


@dataclass(frozen=True)
class Jagged:
    """A KeyedJaggedTensor that the step makes of tensors of the batch."""

    keys: tuple[str, ...]
    parts: tuple[tuple[str, "Source"], ...]
    """Argument of KeyedJaggedTensor -> where it comes from; values come first."""

    def get(self, batch: Any) -> KeyedJaggedTensor:
        """Return one that is made of this batch's tensors."""
        parts: dict[str, Any] = {}
        for name, source in self.parts:
            parts[name] = source.like(parts["values"]) if isinstance(source, Regular) else source.get(batch)
            if isinstance(source, Regular) and (parts[name].numel() - source.ends) % len(self.keys):
                raise ValueError(f"{parts[name].numel()} bags are not as many for each of {len(self.keys)} keys")
        return KeyedJaggedTensor(keys=list(self.keys), **parts)


Source = Constant | Part | View | Jagged | Regular


@dataclass(frozen=True)
class Call:
    """What one lookup of a step is called with."""

    path: str
    """Of the module that is called."""
    arguments: tuple[Source, ...]

    def get(self, batch: Any) -> tuple[Any, ...]:
        """Return the arguments that this batch's step will call with."""
        found: list[Any] = []
        for source in self.arguments:
            found.append(source.like(found[0]) if isinstance(source, Regular) else source.get(batch))
        return tuple(found)


@dataclass(frozen=True)
class Roots:
    """Where paths begin. sparse_inputs: what the user's method of this name returned for the batch, if there is one."""

    batch: Any
    sparse_inputs: Any = None


def _at(found: Any, path: Path) -> Any:
    for kind, key in path:
        found = getattr(found, key) if kind == "attr" else found[key]
    return found


class Leaves:
    """The objects that can be reached from a batch, as they are before its step."""

    def __init__(self, roots: Roots) -> None:
        self._objects: dict[int, tuple[Any, Path]] = {}
        self._also: dict[int, tuple[Path, ...]] = {}
        self._tensors: dict[int, list[tuple[Tensor, Path]]] = {}
        self._walk(roots, ())
        self._stamps = {key: stamps(found) for key, (found, _) in self._objects.items()}

    def _walk(self, found: Any, path: Path) -> None:
        if found is None or isinstance(found, (*SCALARS, bytes)) or len(path) > DEEPEST:
            return
        if id(found) in self._objects:
            self._also[id(found)] = (*self._also.get(id(found), ()), path)
            return
        self._objects[id(found)] = (found, path)
        if isinstance(found, Tensor):
            if found.layout == torch.strided:
                self._tensors.setdefault(found.untyped_storage().data_ptr(), []).append((found, path))
            return
        for step, child in _children(found):
            self._walk(child, (*path, step))

    @property
    def tensors(self) -> list[Tensor]:
        """Those of them that are tensors."""
        return [found for found, _ in self._objects.values() if isinstance(found, Tensor)]

    def source_of(self, argument: Any, of: Any = None) -> Source | str:
        """Return where an argument comes from, or why that is not known.

        of: what the argument says lengths or offsets of, if it does.
        """
        if argument is None or isinstance(argument, SCALARS):
            return Constant(argument)
        if id(argument) in self._objects:
            found, path = self._objects[id(argument)]
            if any(stamp is None for _, stamp in self._stamps[id(argument)]):
                return f"{name_of(path)} was made in inference mode, where writes in place are not counted"
            if not are_unwritten(self._stamps[id(argument)]):
                return f"{name_of(path)} is changed in place before it is looked up"
            return self._part(argument, path)
        if isinstance(argument, KeyedJaggedTensor):
            return self._jagged(argument)
        if isinstance(argument, Tensor):
            return self._view(argument) or regular_like(argument, of) or _computed(argument)
        return _computed(argument)

    def _part(self, found: Any, path: Path) -> Part:
        return Part(path, self._also.get(id(found), ()))

    def _view(self, tensor: Tensor) -> Part | View | None:
        for base, path in self._tensors.get(tensor.untyped_storage().data_ptr(), []):
            if base.numel() and base.dtype == tensor.dtype and are_unwritten(self._stamps[id(base)]):
                view = _view_of(base, self._part(base, path), tensor)
                if view is not None:
                    return view
        return None

    def _jagged(self, argument: KeyedJaggedTensor) -> Jagged | str:
        if argument.variable_stride_per_key() or argument.inverse_indices_or_none() is not None:
            return "a KeyedJaggedTensor with unequal batch sizes per key is made inside of the step"
        given = jagged_fields(argument)
        values = self.source_of(given["values"])
        if isinstance(values, str):
            return values
        parts: list[tuple[str, Source]] = [("values", values)]
        names = [name for name in ("lengths", "offsets") if given[name] is not None]
        found = {name: self.source_of(given[name], given["values"]) for name in names}
        known = [(name, source) for name, source in found.items() if not isinstance(source, str)]
        # What is a part of the batch tells more than what looks regular in one batch.
        known.sort(key=lambda pair: isinstance(pair[1], Regular))
        if known:
            parts.append(known[0])
        else:
            return "the lengths of a KeyedJaggedTensor are computed inside of the step"
        if given["weights"] is not None:
            weights = self.source_of(given["weights"])
            if isinstance(weights, str):
                return weights
            parts.append(("weights", weights))
        return Jagged(tuple(argument.keys()), tuple(parts))


def _children(found: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(found, KeyedJaggedTensor):
        yield from ((("attr", name), getattr(found, name)) for name in JAGGED_TENSOR_FIELDS)
    elif isinstance(found, dict):
        yield from ((("item", key), value) for key, value in found.items())
    elif isinstance(found, (list, tuple)):
        yield from ((("item", i), value) for i, value in enumerate(found))
    elif dataclasses.is_dataclass(found):
        yield from ((("attr", field.name), getattr(found, field.name, None)) for field in dataclasses.fields(found))
    elif hasattr(found, "__dict__"):
        yield from ((("attr", name), value) for name, value in vars(found).items())


def _view_of(base: Tensor, part: Part, tensor: Tensor) -> Part | View | None:
    """Return how `tensor`, which shares the storage of `base`, is a view of it."""
    shape, strides = [int(size) for size in base.shape], [int(stride) for stride in base.stride()]
    if same_memory(base, tensor):
        return part
    start = int(tensor.storage_offset()) - int(base.storage_offset())
    both_whole = base.is_contiguous() and tensor.is_contiguous() and base.numel() == tensor.numel()
    if start == 0 and both_whole and tensor.dim():
        return View(part, "reshape", tuple(tensor.shape[1:]), tuple(shape[1:]))
    for dim in range(base.dim()):
        position, remainder = divmod(start, strides[dim]) if strides[dim] else (0, start)
        if remainder or not 0 <= position < shape[dim]:
            continue
        if _same_geometry(shape[:dim] + shape[dim + 1 :], strides[:dim] + strides[dim + 1 :], tensor):
            return View(part, "select", (dim, position), (shape[dim],))
        if dim > 0 and tensor.dim() == base.dim() and position + tensor.shape[dim] <= shape[dim]:
            narrowed = [*shape[:dim], tensor.shape[dim], *shape[dim + 1 :]]
            if _same_geometry(narrowed, strides, tensor):
                return View(part, "narrow", (dim, position, tensor.shape[dim]), (shape[dim],))
    return None


def _same_geometry(shape: list[int], strides: list[int], tensor: Tensor) -> bool:
    """Whether a tensor has this shape and these strides; those of dims of one element do not matter."""
    if list(tensor.shape) != shape:
        return False
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, tensor.stride(), strict=True))


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.device == other.device
        and _same_geometry(list(one.shape), list(one.stride()), other)
    )


def is_foreseen(given: Any, foreseen: Any) -> bool:
    """Whether the argument of a call is what was foreseen for it: the same memory, or on a CPU the same numbers."""
    if given is foreseen:
        return True
    if isinstance(given, Tensor) and isinstance(foreseen, Tensor):
        return same_memory(given, foreseen) or _equal_on_cpu(given, foreseen)
    if isinstance(given, KeyedJaggedTensor) and isinstance(foreseen, KeyedJaggedTensor):
        return _is_foreseen_jagged(given, foreseen)
    return type(given) is type(foreseen) and isinstance(given, SCALARS) and given == foreseen


def _is_foreseen_jagged(given: KeyedJaggedTensor, foreseen: KeyedJaggedTensor) -> bool:
    if given.keys() != foreseen.keys() or given.variable_stride_per_key():
        return False
    ours, theirs = jagged_fields(foreseen), jagged_fields(given)
    if not is_foreseen(theirs["values"], ours["values"]) or not is_foreseen(theirs["weights"], ours["weights"]):
        return False
    names = [name for name in ("lengths", "offsets") if ours[name] is not None and theirs[name] is not None]
    return any(is_foreseen(theirs[name], ours[name]) for name in names)


def _equal_on_cpu(one: Tensor, other: Tensor) -> bool:
    return one.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)


def stamps(*arguments: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of these arguments, and how often each was written to in place."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, KeyedJaggedTensor):
            tensors += [part for part in jagged_fields(argument).values() if part is not None]
    return [(tensor, version_of(tensor)) for tensor in tensors]


def are_unwritten(stamped: list[tuple[Tensor, int | None]]) -> bool:
    """Whether none of the tensors was written to in place since its stamp; of those without one that is not known."""
    return all(stamp is not None and version_of(tensor) == stamp for tensor, stamp in stamped)


def tensors_in(roots: Any) -> list[Tensor]:
    """Return the tensors that can be reached from a batch."""
    return Leaves(roots).tensors


def name_of(path: Path) -> str:
    """Return how user code writes the path: batch['user'].ids."""
    (_, root), *rest = path
    steps = (f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in rest)
    return "".join((root if root == "batch" else "sparse_inputs(batch)", *steps))


def _computed(argument: Any) -> str:
    what = f"a {type(argument).__name__}"
    if isinstance(argument, Tensor):
        what = f"a tensor of shape {tuple(argument.shape)}"
    return f"{what} that is no part of the batch, but computed inside of the step"
