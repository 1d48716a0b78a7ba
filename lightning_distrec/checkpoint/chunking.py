"""Which chunks of a tensor each rank writes: its shards, or some rows of what all ranks hold replicated."""

import sys
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_distrec._compat.tensors import is_first_replica, local_offsets
from lightning_distrec.chunks import Chunk, ChunkedTensor

SMALL_BYTES = 2**20
"""Replicated tensors below this size are written by one rank each."""


def as_chunked(value: Any) -> ChunkedTensor | None:
    """Return a DTensor, or a torchrec ShardedTensor, as ChunkedTensor, without copying; None for anything else."""
    if isinstance(value, ChunkedTensor):
        return value
    if isinstance(value, DTensor):
        return _chunked_dtensor(value)
    types = sys.modules.get("torchrec.distributed.types")  # slow to load; without it, nobody has made one
    if types is None or not isinstance(value, types.ShardedTensor):
        return None
    shards = value.local_shards() if is_first_replica(value) else []  # the other ranks' are equal
    chunks = [Chunk(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in shards]
    return ChunkedTensor(tuple(value.size()), value.dtype, [chunk for chunk in chunks if chunk.tensor.numel()])


def split_replicated(tensor: Tensor, rank: int, num_ranks: int, turn: int) -> ChunkedTensor:
    """Return what this rank writes of a tensor that all ranks hold: some of its rows.

    turn: tensors that are too small to be split are written by one rank each, in turn.
    """
    shape = tuple(tensor.shape)
    if not shape or shape[0] < num_ranks or tensor.nbytes < SMALL_BYTES:
        chunks = [Chunk((0,) * len(shape), tensor.detach())] if turn % num_ranks == rank else []
        return ChunkedTensor(shape, tensor.dtype, chunks)
    first, end = shape[0] * rank // num_ranks, shape[0] * (rank + 1) // num_ranks
    return ChunkedTensor(shape, tensor.dtype, [Chunk((first, *[0] * (len(shape) - 1)), tensor.detach()[first:end])])


def _chunked_dtensor(tensor: DTensor) -> ChunkedTensor:
    """Return this rank's rectangle; of what several ranks hold replicated, the first rank's."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    is_first = not any(
        coordinate and isinstance(placement, Replicate)
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
    local = tensor.to_local().detach()
    chunks = [Chunk(local_offsets(tensor), local)] if is_first and local.numel() else []
    return ChunkedTensor(tuple(tensor.shape), tensor.dtype, chunks)
