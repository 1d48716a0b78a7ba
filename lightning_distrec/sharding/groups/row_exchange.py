"""What replicas of one shard exchange: gradients of rows before an update, or rows and their state after some."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BLOCK_BYTES = 64 * 2**20
"""How much of a shard is averaged at a time, at most."""


@torch.no_grad()
def average_gradients(weights: Sequence[nn.Parameter], group: Any) -> None:
    """Collective. Replace the gradients of shards by their mean over the replicas, in place.

    weights: the same shards on every rank of `group`, in one order. A gradient that no rank has stays away; where one
    has it, the others count as zeros, and sparse gradients get the rows of all.
    Replicas that have equal weights get equal bits: each of them adds the same numbers in the same order.
    """
    num_replicas = dist.get_world_size(group)
    gradients = [None if weight.grad is None else _summed(weight.grad) for weight in weights]
    kinds = [0 if g is None else 2 + len(g.values()) if g.is_sparse else 1 for g in gradients]
    device = weights[0].device if weights else torch.device("cpu")
    of_replicas = _gathered(torch.tensor(kinds, device=device), group).tolist()
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        found = [kinds[i] for kinds in of_replicas]
        if not any(found):
            continue
        if 1 in found:  # a rank without it may not know its layout
            dense = torch.zeros_like(weight) if gradient is None else gradient.to_dense().contiguous()
            dist.all_reduce(dense, group=group)
            weight.grad = dense.div_(num_replicas)
            continue
        counts = [max(0, kind - 2) for kind in found]
        if not any(counts):
            weight.grad = _no_rows(weight) if gradient is None else gradient
            continue
        rows, values = _padded_rows(weight, gradient, max(counts))
        everyone = (_gathered(rows, group), _gathered(values, group))
        rows, values = (torch.cat([of[:count] for of, count in zip(each, counts, strict=True)]) for each in everyone)
        values = values.float() / num_replicas  # sums in half precision would round at every row
        summed = torch.sparse_coo_tensor(rows.unsqueeze(0), values, weight.shape, check_invariants=False).coalesce()
        weight.grad = summed if weight.dtype == torch.float32 else _as_type(summed, weight.dtype)


def _summed(gradient: Tensor) -> Tensor:
    return gradient.coalesce() if gradient.is_sparse else gradient


def _no_rows(weight: Tensor) -> Tensor:
    nothing = torch.empty(1, 0, dtype=torch.long, device=weight.device)
    return torch.sparse_coo_tensor(nothing, weight.new_empty(0, weight.shape[1]), weight.shape, is_coalesced=True)


def _as_type(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    rows, values = gradient.indices(), gradient.values().to(dtype)
    return torch.sparse_coo_tensor(rows, values, gradient.shape, is_coalesced=True, check_invariants=False)


def _padded_rows(weight: Tensor, gradient: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a sparse gradient, (count,), and their values, (count, columns); zeros fill them up."""
    rows = torch.zeros(count, dtype=torch.long, device=weight.device)
    values = torch.zeros(count, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if gradient is not None:
        own = gradient.indices()[0]
        rows[: len(own)], values[: len(own)] = own, gradient.values()
    return rows, values


def _gathered(tensor: Tensor, group: Any) -> Tensor:
    """Collective. Return every replica's tensor, which have one shape, stacked in their order."""
    found = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(found, tensor.contiguous(), group=group)
    return found.view(-1, *tensor.shape)


@torch.no_grad()
def union_of_rows(rows: Tensor, group: Any) -> Tensor:
    """Collective. Return the numbers that any replica has, ascending. rows: (any number,), of this one."""
    count = int(_gathered(rows.new_tensor([len(rows)]), group).max())
    if not count:
        return rows
    padded = rows.new_full((count,), -1)
    padded[: len(rows)] = rows
    found = _gathered(padded, group).flatten().unique()
    return found[1:] if int(found[0]) < 0 else found


@torch.no_grad()
def average_rows(tensors: Sequence[Tensor], rows: Tensor | None, group: Any) -> None:
    """Collective. Replace rows of tensors by their mean over the replicas, in place.

    tensors: of one number of rows, of which each may have any number of columns. rows: the same on every replica; None:
    all.
    """
    width = sum(tensor[:1].numel() if tensor.dim() > 1 else 1 for tensor in tensors)
    num_rows = len(tensors[0]) if rows is None else len(rows)
    at_once = max(1, BLOCK_BYTES // (4 * width))
    for first in range(0, num_rows, at_once):
        end = min(first + at_once, num_rows)
        some = torch.arange(first, end, device=tensors[0].device) if rows is None else rows[first:end]
        parts = [tensor.index_select(0, some).float().reshape(end - first, -1) for tensor in tensors]
        mean = torch.cat(parts, dim=1)
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        for tensor, part in zip(tensors, mean.split([part.shape[1] for part in parts], dim=1), strict=True):
            tensor.index_copy_(0, some, part.reshape(end - first, *tensor.shape[1:]).to(tensor.dtype))
