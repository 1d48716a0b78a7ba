"""Whether the input of a lookup is the one that was prefetched: the same memory, not written to since."""

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.torch import version_of
from lightning_distrec._compat.torchrec import jagged_fields

SCALARS = (bool, int, float, str)


def is_same_input(given: Any, prefetched: Any) -> bool:
    """Whether the argument of a call is the prefetched one: the same memory, or on a CPU the same numbers."""
    if given is prefetched:
        return True
    if isinstance(given, Tensor) and isinstance(prefetched, Tensor):
        return same_memory(given, prefetched) or _equal_on_cpu(given, prefetched)
    if isinstance(given, KeyedJaggedTensor) and isinstance(prefetched, KeyedJaggedTensor):
        return _is_same_jagged(given, prefetched)
    return type(given) is type(prefetched) and isinstance(given, SCALARS) and given == prefetched


def _is_same_jagged(given: KeyedJaggedTensor, prefetched: KeyedJaggedTensor) -> bool:
    if given.keys() != prefetched.keys() or given.variable_stride_per_key():
        return False
    ours, theirs = jagged_fields(prefetched), jagged_fields(given)
    if not is_same_input(theirs["values"], ours["values"]) or not is_same_input(theirs["weights"], ours["weights"]):
        return False
    names = [name for name in ("lengths", "offsets") if ours[name] is not None and theirs[name] is not None]
    return any(is_same_input(theirs[name], ours[name]) for name in names)


def _equal_on_cpu(one: Tensor, other: Tensor) -> bool:
    return one.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.device == other.device
        and same_geometry(list(one.shape), list(one.stride()), other)
    )


def same_geometry(shape: list[int], strides: list[int], tensor: Tensor) -> bool:
    """Whether a tensor has this shape and these strides; strides of dims of one element do not matter."""
    if list(tensor.shape) != shape:
        return False
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, tensor.stride(), strict=True))


def versions(*arguments: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of these arguments, and how often each was written to in place; None: it is not counted."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, KeyedJaggedTensor):
            tensors += [field for field in jagged_fields(argument).values() if field is not None]
    return [(tensor, version_of(tensor)) for tensor in tensors]


def are_unwritten(versioned: list[tuple[Tensor, int | None]]) -> bool:
    """Whether none of the tensors was written to in place since `versions`; false where writes are not counted."""
    return all(version is not None and version_of(tensor) == version for tensor, version in versioned)
