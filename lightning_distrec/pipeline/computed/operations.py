"""What a recording consists of: operations, and where their inputs come from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_distrec._compat.torch import version_of
from lightning_distrec.pipeline.provenance.sources import Path, path_text


class NotReadyError(Exception):
    """This batch's lookups cannot be sent ahead: what the step will compute from it is not known yet."""


@dataclass(frozen=True)
class BatchTensor:
    """A tensor of the batch."""

    path: Path

    def __repr__(self) -> str:
        return path_text(self.path)


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that is not the batch's and was there before the step: a buffer, or an attribute of a module.

    read: returns it as it is now.
    """

    name: str
    read: Callable[[], Any] = field(compare=False)

    def __repr__(self) -> str:
        return self.name

    def stamp(self) -> tuple[int, int | None]:
        """Return what changes when it is replaced or written to."""
        tensor = self.read()
        return id(tensor), version_of(tensor) if isinstance(tensor, Tensor) else None


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


Input = BatchTensor | HeldTensor | Constant | Result

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


@dataclass
class Operation:
    """One operation that torch has dispatched."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    storages: frozenset[int]
    """Of its tensors, in the step that was recorded."""

    def inputs(self) -> Iterator[Input]:
        """Yield where its tensors come from."""
        for found in flatten((self.args, self.kwargs)):
            if isinstance(found, (BatchTensor, HeldTensor, Constant, Result)):
                yield found

    def numbers(self) -> Iterator[Number]:
        """Yield its integers."""
        for found in flatten((self.args, self.kwargs)):
            if isinstance(found, Number):
                yield found


@dataclass
class Read:
    """A value that Python has read from a tensor: bool(), .item()."""

    operation: int | None
    """None: it cannot be computed ahead."""
    value: Any
    origins: frozenset[Origin]
    reason: str = ""
    """Why it cannot be computed ahead."""
    is_used: bool = False
    """Whether a later operation was given this number."""


def flatten(found: Any) -> Iterator[Any]:
    """Yield what is in lists, tuples and dicts."""
    if isinstance(found, (list, tuple)):
        for child in found:
            yield from flatten(child)
    elif isinstance(found, dict):
        for child in found.values():
            yield from flatten(child)
    else:
        yield found


def tensors_of(found: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts."""
    return [child for child in flatten(found) if isinstance(child, torch.Tensor)]
