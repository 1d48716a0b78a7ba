"""What a recording consists of: operations, and where their inputs come from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec._compat.torch import version_of
from lightning_distrec.prefetch.provenance.sources import Path, path_text

COPIED_BYTES = 64 * 2**20
"""A larger held tensor is not copied, and counts as changed once it is written to."""


class NotReadyError(Exception):
    """This batch's lookups cannot be sent ahead: what the step will compute from it is not known yet."""


@dataclass(frozen=True)
class BatchTensor:
    """A tensor of the batch."""

    path: Path

    def __repr__(self) -> str:
        return path_text(self.path)


class HeldTensor:
    """A tensor that is not the batch's and was there before the step: a buffer, or an attribute of a module.

    read: returns it as it is now.
    """

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        self.name = name
        self.read = read
        self.tensor: Tensor | None = None
        """As it was when a lookup of the recorded step first depended on it."""
        self._stamp: Any = None
        self._copy: Tensor | None = None

    def __repr__(self) -> str:
        return self.name

    def keep(self) -> None:
        """Note its value, with which `changed` compares later ones."""
        if self.tensor is None:
            self.tensor = tensor = self.read()
            self._stamp = _stamp(tensor)
            is_small = tensor.numel() * tensor.element_size() <= COPIED_BYTES
            self._copy = tensor.detach().clone() if is_small else None

    def had_same_value(self, other: "HeldTensor") -> bool:
        """Whether it had the value of another one when they were kept."""
        assert self.tensor is not None
        assert other.tensor is not None
        return self.tensor is other.tensor or are_equal(self.tensor, other.tensor)

    def changed(self) -> bool:
        """Whether it has another value now."""
        tensor = self.read()
        stamp = _stamp(tensor)
        if stamp == self._stamp:
            return False
        # A broadcast of buffers writes to them and changes nothing.
        if self._copy is None or not isinstance(tensor, Tensor) or not are_equal(tensor, self._copy):
            return True
        self._stamp = stamp
        return False


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the step makes of Python numbers: torch.tensor([...])."""

    value: Tensor

    def __repr__(self) -> str:
        return "constant"


@dataclass(frozen=True)
class Result:
    """One output of a recorded operation."""

    operation: int
    output: int

    def __repr__(self) -> str:
        return "a tensor that the step computes"


Input = BatchTensor | HeldTensor | Constant | Result
Guards = dict[int, "bool | Number"]
"""Operation whose value Python has read before a call, and may have branched on -> what it was; the number that it has
been."""
Origin = tuple[Any, ...]
"""Where a number may come from: ("const", value), ("size", path, dim, plus), ("numel", path), ("item", path) or
("read", operation), for one that Python has read."""


@dataclass
class Number:
    """An integer that is given to an operation. It has come from any of these origins in every step so far."""

    origins: frozenset[Origin]

    @property
    def reads(self) -> list[int]:
        """The operations whose value it may be."""
        return [origin[1] for origin in self.origins if origin[0] == "read"]

    def narrow(self, other: "Number", places: dict[int, int]) -> bool:
        """Keep the origins that it has in another recording too. Returns whether there are any.

        places: operation of the other recording -> that of this one.
        """
        self.origins &= {("read", places.get(origin[1])) if origin[0] == "read" else origin for origin in other.origins}
        return bool(self.origins)


@dataclass
class Operation:
    """One operation that torch has dispatched."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    storages: frozenset[int]
    """Of its tensors, in the step that was recorded."""

    @property
    def parts(self) -> list[Any]:
        """Its arguments, without the lists that they are in."""
        return list(flatten((self.args, self.kwargs)))


def flatten(value: Any) -> Iterator[Any]:
    """Yield what is in lists, tuples and dicts."""
    if isinstance(value, (list, tuple, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from flatten(child)
    else:
        yield value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts."""
    return [child for child in flatten(value) if isinstance(child, Tensor)]


def are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, of one type, on one device."""
    return tensor.dtype == other.dtype and tensor.device == other.device and torch.equal(tensor, other)


def held_tensors(module: nn.Module) -> Iterator[tuple[Tensor, HeldTensor]]:
    """Yield the tensors that can be read again by name: buffers, frozen parameters, attributes, lists and dicts."""
    for prefix, child in module.named_modules():
        name = f"self.{prefix}" if prefix else "self"
        attributes = [*child.named_buffers(recurse=False), *child.named_parameters(recurse=False), *vars(child).items()]
        for key, value in attributes:
            if isinstance(value, Tensor):
                if not value.requires_grad:
                    yield value, HeldTensor(f"{name}.{key}", partial(getattr, child, key))
            elif type(value) in (list, tuple, dict) and not key.startswith("_"):
                for entry_key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(entry, Tensor) and not entry.requires_grad:
                        yield entry, HeldTensor(f"{name}.{key}[{entry_key!r}]", partial(_entry, child, key, entry_key))


def _entry(module: nn.Module, name: str, key: Any) -> Any:
    return getattr(module, name)[key]


def _stamp(tensor: Any) -> tuple[int, int | None]:
    """Return what is another one once a tensor is replaced or written to."""
    return id(tensor), version_of(tensor) if isinstance(tensor, Tensor) else None
