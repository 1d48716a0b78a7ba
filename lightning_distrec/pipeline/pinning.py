"""Brings a batch to a GPU while the host goes on: from pinned memory, and without waiting for the copy.

Not run on a GPU yet.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec.streamable import Pipelineable

from lightning_distrec.pipeline.provenance.batch_objects import tensors_in


@runtime_checkable
class Pinnable(Protocol):
    """A tensor, a KeyedJaggedTensor, or what defines pin_memory for DataLoaders."""

    def pin_memory(self) -> Any:
        """Return a copy in pinned memory."""


def pinned(batch: Any) -> Any:
    """Return the batch with its dense tensors on the host copied to pinned memory, those that are there as they are.

    Dicts, lists, tuples and dataclasses are looked into. Sparse tensors and those on devices cannot be pinned.
    """
    return apply_to_collection(batch, Pinnable, _pinned, allow_frozen=True)


def _pinned(data: Any) -> Any:
    tensors = [data] if isinstance(data, Tensor) else tensors_in(data)
    can_be = all(of.is_cpu and of.layout == torch.strided and not of.is_nested for of in tensors)
    return data.pin_memory() if can_be else data


def moved_jagged(batch: Any, device: torch.device) -> Any:
    """Return the batch with KeyedJaggedTensors, and what else torchrec can pipeline, copied to the device.

    Lightning copies all but plain tensors by `to(device)`, which waits.
    """
    return apply_to_collection(batch, Pipelineable, lambda data: data.to(device, non_blocking=True), allow_frozen=True)
