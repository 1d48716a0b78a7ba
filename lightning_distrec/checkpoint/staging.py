"""Copies of tensors on the host, for a checkpoint that is written while training changes them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_distrec.chunks import Chunk, ChunkedTensor


def copy_to_host(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """Return copies on the host of this rank's chunks; copies from GPUs overlap, and are awaited together."""
    copies = {
        name: ChunkedTensor(
            full.shape, full.dtype, [Chunk(chunk.offsets, _copy(chunk.tensor)) for chunk in full.chunks]
        )
        for name, full in tensors.items()
    }
    for device in {chunk.tensor.device for full in tensors.values() for chunk in full.chunks}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copies


def _copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)
