"""Private names of torch's sparse and sharded tensors."""

from typing import Any

import torch


def rows_and_values(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row numbers and values of a table's sparse gradient, in which rows may occur more than once.

    The public methods refuse uncoalesced gradients, and coalescing sorts them.
    """
    return gradient._indices()[0], gradient._values()


def mark_coalesced(gradient: torch.Tensor, num_rows: int) -> None:
    """Mark a sparse gradient as coalesced if it has just `num_rows` entries.

    Accumulating a sparse gradient forgets that it is coalesced, and who needs it so sorts it again, for which the host
    waits for a GPU. Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    if gradient.is_sparse and gradient._nnz() == num_rows:
        gradient._coalesced_(True)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's memory, which alone can be recorded on a stream.

    The public methods of a sparse tensor refuse one that is not coalesced.
    """
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.layout == torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
    return (tensor.values(),) if tensor.is_nested else (tensor,)


def local_offsets(tensor: Any) -> tuple[int, ...]:
    """Return the offsets of this rank's local tensor within a DTensor, one per dim.

    Source: torch/distributed/tensor/_utils.py.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def is_first_replica(tensor: Any) -> bool:
    """Return whether a ShardedTensor is of the group of ranks with rank 0; others have replicas of its shards.

    Source: torch/distributed/_shard/sharded_tensor/api.py.
    """
    return 0 in torch.distributed.get_process_group_ranks(tensor._process_group)
