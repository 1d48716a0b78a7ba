"""Whether the input of a lookup is the one that was prefetched: the same memory, not written to since."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec._compat.torch import version_of
from lightning_distrec._compat.torchrec import jagged_fields
from lightning_distrec.late_weights import LateWeights

Compare = Callable[[Tensor, Tensor], bool]
SCALARS = (bool, int, float, str)


def is_same_input(argument: Any, prefetched: Any, compare: Compare | None = None) -> bool:
    """Whether the argument of a call is the prefetched one: the same memory, or on a CPU the same numbers.

    compare: compares the numbers of two tensors of one shape on another device; None: they are not the same.
    """
    if argument is prefetched:
        return True
    if isinstance(prefetched, LateWeights):
        return isinstance(argument, Tensor) and argument.shape == prefetched.shape and argument.is_floating_point()
    if isinstance(argument, Tensor) and isinstance(prefetched, Tensor):
        return same_memory(argument, prefetched) or _are_equal(argument, prefetched, compare)
    if isinstance(argument, KeyedJaggedTensor) and isinstance(prefetched, KeyedJaggedTensor):
        return _is_same_jagged(argument, prefetched, compare)
    return type(argument) is type(prefetched) and isinstance(argument, SCALARS) and argument == prefetched


def _is_same_jagged(argument: KeyedJaggedTensor, prefetched: KeyedJaggedTensor, compare: Compare | None) -> bool:
    if argument.keys() != prefetched.keys() or argument.variable_stride_per_key():
        return False
    prefetched_fields, fields = jagged_fields(prefetched), jagged_fields(argument)
    if not all(is_same_input(fields[name], prefetched_fields[name], compare) for name in ("values", "weights")):
        return False
    names = [
        name for name in ("lengths", "offsets") if prefetched_fields[name] is not None and fields[name] is not None
    ]
    return any(is_same_input(fields[name], prefetched_fields[name], compare) for name in names)


def _are_equal(tensor: Tensor, other: Tensor, compare: Compare | None) -> bool:
    if tensor.dtype != other.dtype or tensor.device != other.device:
        return False
    if not gpu.is_on_gpu(tensor):
        return torch.equal(tensor, other)
    return compare is not None and tensor.shape == other.shape and compare(tensor, other)


def same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.dtype == other.dtype
        and tensor.device == other.device
        and same_geometry(list(tensor.shape), list(tensor.stride()), other)
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


def has_same_leaves(argument: Any, batch: Any) -> bool:
    """Whether this is the batch, or dicts, lists and tuples around the very same objects.

    DistributedDataParallel with device_ids and FSDP2's root rebuild the containers of what they are called with.
    """
    if argument is batch:
        return True
    if isinstance(batch, dict):
        same_keys = isinstance(argument, dict) and argument.keys() == batch.keys()
        return same_keys and all(has_same_leaves(argument[key], value) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        same_length = isinstance(argument, (list, tuple)) and len(argument) == len(batch)
        return same_length and all(map(has_same_leaves, argument, batch))
    # Numbers and texts have no identity that counts.
    return isinstance(batch, SCALARS) and type(argument) is type(batch) and bool(argument == batch)
