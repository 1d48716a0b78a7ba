"""What each rank writes of a tensor: its shards, or its share of what all ranks hold alike."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_distrec._compat.torch import local_offsets
from lightning_distrec.chunks import ChunkedTensor, Part, Whole


def parts_of(value: Any) -> ChunkedTensor | None:
    """Return a DTensor, or a torchrec ShardedTensor, as ChunkedTensor, without copying; None for anything else."""
    if isinstance(value, ChunkedTensor):
        return value
    if isinstance(value, DTensor):
        return _parts_of_dtensor(value)
    types = sys.modules.get("torchrec.distributed.types")  # slow to load; without it, nobody has made one
    if types is None or not isinstance(value, types.ShardedTensor):
        return None
    parts = [Part(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in value.local_shards()]
    return ChunkedTensor(tuple(value.size()), value.dtype, [part for part in parts if part.tensor.numel()])


def share_of(tensor: Tensor, rank: int, num_ranks: int, turn: int) -> ChunkedTensor:
    """Return what this rank writes of a tensor that all ranks hold alike: some of its rows.

    turn: tensors that are too small to be shared are written by one rank each, in turn.
    """
    shape = tuple(tensor.shape)
    if not shape or shape[0] < num_ranks or tensor.nbytes < 2**20:
        mine = [Part((0,) * len(shape), tensor.detach())] if turn % num_ranks == rank else []
        return ChunkedTensor(shape, tensor.dtype, mine)
    first, end = shape[0] * rank // num_ranks, shape[0] * (rank + 1) // num_ranks
    return ChunkedTensor(shape, tensor.dtype, [Part((first, *[0] * (len(shape) - 1)), tensor.detach()[first:end])])


def _parts_of_dtensor(tensor: DTensor) -> ChunkedTensor:
    """Return this rank's rectangle; of what several ranks hold alike, the first one's."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    is_first = not any(
        coordinate and isinstance(placement, Replicate)
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
    local = tensor.to_local().detach()
    parts = [Part(local_offsets(tensor), local)] if is_first and local.numel() else []
    return ChunkedTensor(tuple(tensor.shape), tensor.dtype, parts)


def read_as(whole: Whole, like: DTensor) -> DTensor:
    """Read this rank's rectangle of a tensor in a file that lies on the ranks as `like` does, and has its shape."""
    local = torch.empty_like(like.to_local(), dtype=whole.dtype)
    if local.numel():
        whole.fill([Part(local_offsets(like), local)])
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
