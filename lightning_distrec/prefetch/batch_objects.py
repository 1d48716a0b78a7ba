"""Finds where the inputs of a lookup come from: which objects of the batch, by identity.

A training_step is neither traced nor rewritten. In the first step it runs as it is, and each
argument of a lookup is looked for among the objects of the batch: the very same object, a view of
one of its tensors, or a KeyedJaggedTensor made of them. From later batches the argument is built
before their steps begin; when the step calls, its argument is compared with the one that was built:
sources.is_same_input.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.torchrec_modules import JAGGED_TENSOR_FIELDS, jagged_fields
from lightning_distrec.prefetch.sources import (
    SCALARS,
    BatchRoots,
    ConstantSource,
    JaggedSource,
    LateSource,
    Path,
    PathSource,
    PathStep,
    Source,
    UniformSource,
    ViewSource,
    are_unwritten,
    find_uniform_source,
    object_at,
    path_text,
    same_geometry,
    same_memory,
    versions,
)

Compute = Callable[[Tensor], Source | str]
MAX_DEPTH = 8
"""Containers within containers that are looked into."""


class BatchObjects:
    """The objects that can be reached from a batch, as they are before its step."""

    def __init__(self, roots: BatchRoots) -> None:
        # By id, and with the object itself: the id of one that was freed may be given to another
        # one.
        self._objects: dict[int, tuple[Any, Path]] = {}
        self._aliases: dict[int, tuple[Path, ...]] = {}
        self._tensors: dict[int, list[tuple[Tensor, Path]]] = {}
        self._walk(roots, ())
        self._versions = {key: versions(child) for key, (child, _) in self._objects.items()}

    def _walk(self, value: Any, path: Path) -> None:
        if value is None or isinstance(value, (*SCALARS, bytes)) or len(path) > MAX_DEPTH:
            return
        if id(value) in self._objects:
            self._aliases[id(value)] = (*self._aliases.get(id(value), ()), path)
            return
        self._objects[id(value)] = (value, path)
        if isinstance(value, Tensor):
            # Tensors of other layouts have no storage of their own that a view could share.
            if value.layout == torch.strided:
                self._tensors.setdefault(value.untyped_storage().data_ptr(), []).append((
                    value,
                    path,
                ))
            return
        for step, child in _children(value):
            self._walk(child, (*path, step))

    @property
    def tensors_with_paths(self) -> list[tuple[Tensor, Path]]:
        """Those of them that are tensors, and where they are."""
        children = []
        for child, path in self._objects.values():
            if isinstance(child, Tensor):
                children.append((child, path))
        return children

    def has(self, value: Any) -> bool:
        """Whether this very object is one of them."""
        return id(value) in self._objects

    def is_unwritten(self, tensor: Tensor) -> bool:
        """Whether one of its tensors was not written to since."""
        return are_unwritten(self._versions[id(tensor)])

    @property
    def with_paths(self) -> list[tuple[Any, Path]]:
        """All of them, and where they are."""
        return list(self._objects.values())

    def source_of(
        self, argument: Any, ids: Any = None, compute: Compute | None = None
    ) -> Source | str:
        """Return where an argument comes from, or why that is not known.

        ids: those that the argument may be the lengths, offsets or weights of. compute: returns the
        operations that make a tensor which is no part of the batch, or why they cannot be repeated;
        None: they are not known.
        """
        if argument is None or isinstance(argument, SCALARS):
            return ConstantSource(argument)
        if id(argument) in self._objects and not isinstance(argument, (Tensor, KeyedJaggedTensor)):
            return f"a {type(argument).__name__} may be written to without a trace"
        if id(argument) in self._objects:
            _, path = self._objects[id(argument)]
            if any(version is None for _, version in self._versions[id(argument)]):
                return (
                    f"{path_text(path)} was made in inference mode, where writes in place are not "
                    "counted"
                )
            if not are_unwritten(self._versions[id(argument)]):
                return f"{path_text(path)} is changed in place before it is looked up"
            return self._path_source(argument, path)
        if isinstance(argument, KeyedJaggedTensor):
            return self._jagged_source(argument, compute)
        if isinstance(argument, Tensor):
            view = self._view_source(argument)
            return self._made_source(argument, ids, compute) if view is None else view
        return _describe(argument)

    def _made_source(self, tensor: Tensor, ids: Any, compute: Compute | None) -> Source | str:
        source = _describe(tensor) if compute is None else compute(tensor)
        uniform = find_uniform_source(tensor, ids)
        # Lengths that are computed from the batch are regular by chance.
        if uniform is not None and (isinstance(source, str) or not source.paths):
            return uniform
        is_weights = ids is not None and tensor.is_floating_point()
        return LateSource() if is_weights and isinstance(source, str) else source

    def _path_source(self, value: Any, path: Path) -> PathSource:
        return PathSource(path, self._aliases.get(id(value), ()))

    def _view_source(self, tensor: Tensor) -> PathSource | ViewSource | None:
        for base, path in self._tensors.get(tensor.untyped_storage().data_ptr(), []):
            if (
                base.numel()
                and base.dtype == tensor.dtype
                and are_unwritten(self._versions[id(base)])
            ):
                view = _find_view(base, self._path_source(base, path), tensor)
                if view is not None:
                    return view
        return None

    def _jagged_source(
        self, argument: KeyedJaggedTensor, compute: Compute | None
    ) -> JaggedSource | str:
        if argument.variable_stride_per_key() or argument.inverse_indices_or_none() is not None:
            return "a KeyedJaggedTensor with unequal batch sizes per key is made inside of the step"
        jagged = jagged_fields(argument)
        values = self.source_of(jagged["values"], None, compute)
        if isinstance(values, str):
            return values
        fields: list[tuple[str, Source]] = [("values", values)]
        lengths: list[tuple[str, Source]] = []
        reason = ""
        for name in ("lengths", "offsets"):
            if jagged[name] is None:
                continue
            source = self.source_of(jagged[name], jagged["values"], compute)
            if isinstance(source, str):
                reason = reason or source
            else:
                lengths.append((name, source))
        if not lengths:
            cause = "" if compute is None else f": {reason}"
            return f"the lengths of a KeyedJaggedTensor are computed inside of the step{cause}"
        fields.append(min(lengths, key=_evidence))
        if jagged["weights"] is not None:
            weights = self.source_of(jagged["weights"], jagged["values"], compute)
            if isinstance(weights, str):
                return weights
            fields.append(("weights", weights))
        return JaggedSource(tuple(argument.keys()), tuple(fields))


def _evidence(field: tuple[str, Source]) -> tuple[bool, bool]:
    # An object of the batch is better evidence than a tensor that happens to be uniform in the
    # first batch.
    _, source = field
    return isinstance(source, UniformSource), not source.paths


def _children(parent: Any) -> Iterator[tuple[PathStep, Any]]:
    kind = "item"
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(parent, dict):
        entries = parent.items()
    elif isinstance(parent, (list, tuple)):
        entries = enumerate(parent)
    else:
        kind = "attr"
        names: Iterable[str] = ()
        if isinstance(parent, KeyedJaggedTensor):
            names = JAGGED_TENSOR_FIELDS
        elif dataclasses.is_dataclass(parent):
            names = [field.name for field in dataclasses.fields(parent)]
        elif hasattr(parent, "__dict__"):
            entries = vars(parent).items()
        entries = entries or [(name, getattr(parent, name, None)) for name in names]
    for key, child in entries:
        yield (kind, key), child


def _find_view(base: Tensor, source: PathSource, tensor: Tensor) -> PathSource | ViewSource | None:
    """Return how `tensor`, which shares the storage of `base`, is a view of it."""
    if same_memory(base, tensor):
        return source
    start = int(tensor.storage_offset()) - int(base.storage_offset())
    are_contiguous = base.is_contiguous() and tensor.is_contiguous()
    if start == 0 and are_contiguous and base.numel() == tensor.numel() and tensor.dim():
        return ViewSource(source, "reshape", tuple(tensor.shape[1:]), tuple(base.shape[1:]))
    for dim in range(base.dim()):
        view = _find_part(base, source, tensor, dim, start)
        if view is not None:
            return view
    return None


def _find_part(
    base: Tensor, source: PathSource, tensor: Tensor, dim: int, start: int
) -> ViewSource | None:
    """Return which place or range of a dim `tensor` is. start: elements before its first one."""
    shape = list(base.shape)
    strides = list(base.stride())
    size = shape.pop(dim)
    stride = strides.pop(dim)
    # What begins at place i of a dim begins i strides of this dim after the base.
    position, remainder = divmod(start, stride) if stride else (0, start)
    if remainder or not 0 <= position < size:
        return None
    if same_geometry(shape, strides, tensor):
        return ViewSource(source, "select", (dim, position), (size,))
    # No range of dim 0: how many rows a batch has changes from step to step.
    if dim == 0 or tensor.dim() != base.dim():
        return None
    num_columns = tensor.shape[dim]
    shape.insert(dim, num_columns)
    if position + num_columns > size or not same_geometry(shape, list(base.stride()), tensor):
        return None
    return ViewSource(source, "narrow", (dim, position, num_columns), (size,))


def tensors_in(roots: Any) -> list[Tensor]:
    """Return the tensors that can be reached from a batch."""
    return [tensor for tensor, _ in BatchObjects(roots).tensors_with_paths]


def _describe(argument: Any) -> str:
    text = f"a {type(argument).__name__}"
    if isinstance(argument, Tensor):
        text = f"a tensor of shape {tuple(argument.shape)}"
    return f"{text} that is no part of the batch, but computed inside of the step"


class FeatureOrder:
    """The order of features in the first batch of a kind of step.

    objects: those of that batch. paths: of the objects that tables are called with. names: of
    tables and features.
    """

    def __init__(self, objects: BatchObjects, paths: Iterable[Path], names: set[str]) -> None:
        used: dict[Path, set[Any]] = {}
        """Path of a container on the way to such an object -> the keys by which it goes on."""
        for path in paths:
            for i, (_, key) in enumerate(path):
                used.setdefault(path[:i], set()).add(key)
        self._orders: list[tuple[Path, set[Any], list[Any]]] = []
        """Path of a dict or KeyedJaggedTensor, which of its keys count, and these in their
        order."""
        self._names: list[tuple[Path, str]] = []
        """Path of a text of the batch that names a feature, and that name."""
        for container, path in objects.with_paths:
            if path in used and isinstance(container, (dict, KeyedJaggedTensor)):
                counting = used[path] | names
                self._orders.append((path, counting, _key_order(container, counting)))
            for step, text in _texts(container):
                if text in names:
                    self._names.append(((*path, step), text))

    def difference(self, roots: BatchRoots) -> str:
        """Return in what a batch differs from the first one, or "". Raises as `object_at` does."""
        for path, counting, order in self._orders:
            new_order = _key_order(object_at(roots, path), counting)
            if new_order != order:
                return f"{path_text(path)} has the features {new_order}, and had {order}"
        for path, name in self._names:
            text = object_at(roots, path)
            if text != name:
                return f"{path_text(path)} is {text!r}, and was {name!r}"
        return ""


def _key_order(container: Any, counting: set[Any]) -> list[Any]:
    if isinstance(container, dict):
        return [key for key in container if key in counting]
    return list(container.keys())


def _texts(container: Any) -> Iterator[tuple[tuple[str, Any], str]]:
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(container, (list, tuple)):
        entries = enumerate(container)
    elif isinstance(container, dict):
        entries = container.items()
    for key, child in entries:
        if isinstance(child, str):
            yield ("item", key), child
