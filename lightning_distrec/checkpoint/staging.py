"""Copies of tensors on the host, for a checkpoint that is written while training changes them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_distrec.chunks import ChunkedTensor, Part


def copy_to_host(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """Return copies on the host of this rank's parts; from GPUs, all of them are under way at once."""
    copies = {
        name: ChunkedTensor(
            parted.shape, parted.dtype, [Part(part.offsets, _copy(part.tensor)) for part in parted.parts]
        )
        for name, parted in tensors.items()
    }
    for device in {part.tensor.device for parted in tensors.values() for part in parted.parts}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copies


def _copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)
