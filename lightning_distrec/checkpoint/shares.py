"""What each rank writes of a tensor: its shards, or its share of what all ranks hold alike."""

from typing import Any

from torch import Tensor

from lightning_distrec.parts import Part, Parted


def parts_of(value: Any) -> Parted | None:
    """Return a torchrec ShardedTensor as Parted, without copying; None for anything else."""
    if isinstance(value, Parted):
        return value
    from torchrec.distributed.types import ShardedTensor  # slow to load, and commands over files have no use for it

    if not isinstance(value, ShardedTensor):
        return None
    parts = [Part(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in value.local_shards()]
    return Parted(tuple(value.size()), value.dtype, [part for part in parts if part.tensor.numel()])


def share_of(tensor: Tensor, rank: int, num_ranks: int, turn: int) -> Parted:
    """Return what this rank writes of a tensor that all ranks hold alike: some of its rows.

    turn: tensors that are too small to be shared are written by one rank each, in turn.
    """
    shape = tuple(tensor.shape)
    if not shape or shape[0] < num_ranks or tensor.nbytes < 2**20:
        mine = [Part((0,) * len(shape), tensor.detach())] if turn % num_ranks == rank else []
        return Parted(shape, tensor.dtype, mine)
    first, end = shape[0] * rank // num_ranks, shape[0] * (rank + 1) // num_ranks
    return Parted(shape, tensor.dtype, [Part((first, *[0] * (len(shape) - 1)), tensor.detach()[first:end])])
