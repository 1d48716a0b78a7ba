"""What replicas of one shard exchange: gradients of rows before an update, or rows and their state
after some."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BLOCK_BYTES = 64 * 2**20
"""How much of a shard is averaged at a time, at most."""


@torch.no_grad()
def average_gradients(weights: Sequence[nn.Parameter], group: Any) -> None:
    """Collective. Replace the gradients of shards by their mean over the replicas.

    weights: the same shards on every rank of `group`, in one order. A gradient that no rank has
    stays away; where one has it, the others count as zeros, and sparse gradients get the rows of
    all.
    Replicas that have equal weights get equal bits: each of them adds the same numbers in the same
    order.
    """
    if not weights:
        return
    gradients = []
    forms = []
    for weight in weights:
        gradient = weight.grad
        form = _NONE
        if gradient is not None:
            form = _DENSE
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                form = _FIRST_SPARSE + len(gradient.values())
        gradients.append(gradient)
        forms.append(form)
    # First what each has: replicas see other ids, so that one may have no gradient where another
    # has one.
    # What follows is decided by the gathered forms, alike on all replicas.
    per_replica = _gathered(torch.tensor(forms, device=weights[0].device), group).tolist()
    sparse = []
    for i, kinds in enumerate(zip(*per_replica, strict=True)):
        if _DENSE in kinds:  # one at a time, and in place: it may be as large as the shard
            _average_dense(weights[i], gradients[i], group)
        elif any(kinds):
            sparse.append(i)
    if sparse:
        counts = []
        for replica_forms in per_replica:
            counts.append([max(0, replica_forms[i] - _FIRST_SPARSE) for i in sparse])
        _average_sparse([weights[i] for i in sparse], [gradients[i] for i in sparse], counts, group)


_NONE, _DENSE, _FIRST_SPARSE = range(3)
"""What a rank sends of a gradient: that it has none, or a dense one, or this plus the number of its
rows."""


def _average_dense(weight: nn.Parameter, gradient: Tensor | None, group: Any) -> None:
    mean = torch.zeros_like(weight) if gradient is None else gradient.to_dense()
    mean = mean.float().contiguous()  # sums in half precision would round once for each replica
    dist.all_reduce(mean, group=group)
    weight.grad = mean.div_(dist.get_world_size(group)).to(weight.dtype)


def _average_sparse(
    weights: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    counts: list[list[int]],
    group: Any,
) -> None:
    """counts: of each replica, and each gradient, the number of its rows."""
    local = [g for g in gradients if g is not None and len(g.values())]
    widths = [weight.shape[1] for weight in weights]
    sizes = []
    for row_counts in counts:
        sizes.append([count * width for count, width in zip(row_counts, widths, strict=True)])
    # With an empty one first, so that a replica without rows has something to send: all must
    # exchange. A shard with 2^31 rows would not fit into any rank's memory.
    sent_rows = [weights[0].new_empty(0, dtype=torch.int32)]
    sent_values = [weights[0].new_empty(0, dtype=torch.float32)]
    for gradient in local:
        sent_rows.append(gradient.indices()[0].int())
        sent_values.append(gradient.values().float().flatten())
    rows = _gathered_uneven(torch.cat(sent_rows), counts, group)
    values = _gathered_uneven(torch.cat(sent_values), sizes, group)
    for i, weight in enumerate(weights):
        indices = torch.cat([row_counts[i] for row_counts in rows]).long().unsqueeze(0)
        # Added up in float32: sums in half precision would round at every row.
        added = torch.cat([row_counts[i] for row_counts in values]).view(-1, widths[i]) / len(rows)
        mean = torch.sparse_coo_tensor(
            indices, added, weight.shape, check_invariants=False
        ).coalesce()
        weight.grad = mean if weight.dtype == torch.float32 else _as_type(mean, weight.dtype)


def _as_type(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    rows = gradient.indices()
    values = gradient.values().to(dtype)
    return torch.sparse_coo_tensor(
        rows, values, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _gathered_uneven(sent: Tensor, sizes: list[list[int]], group: Any) -> list[tuple[Tensor, ...]]:
    """Collective. Return the parts of every replica. sizes: of each replica and part, its number of
    elements."""
    longest = max(map(sum, sizes))
    # `sizes` was gathered, so that all replicas return here or none does.
    if not longest:
        return [(sent,) * len(sizes[0])] * len(sizes)
    # all_gather_into_tensor takes equal sizes.
    padded = sent.new_zeros(longest)
    padded[: len(sent)] = sent
    gathered = _gathered(padded, group)
    return [
        flat[: sum(replica_sizes)].split(replica_sizes)
        for flat, replica_sizes in zip(gathered, sizes, strict=True)
    ]


def _gathered(tensor: Tensor, group: Any) -> Tensor:
    """Collective. Return every replica's tensor, which have one shape, stacked in their order."""
    gathered = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered.view(-1, *tensor.shape)


@torch.no_grad()
def union_of_rows(rows: Tensor, group: Any) -> Tensor:
    """Collective. Return the numbers that any replica has, ascending. rows: (any number,), of this
    one."""
    count = int(_gathered(rows.new_tensor([len(rows)]), group).max())
    if not count:
        return rows
    # Below every row, so that unique() sorts the padding to the front.
    padded = rows.new_full((count,), -1)
    padded[: len(rows)] = rows
    rows_of_any = _gathered(padded, group).flatten().unique()
    return rows_of_any[1:] if int(rows_of_any[0]) < 0 else rows_of_any


@torch.no_grad()
def average_rows(tensors: Sequence[Tensor], rows: Tensor | None, group: Any) -> None:
    """Collective. Replace rows of tensors by their mean over the replicas, in place.

    tensors: of one number of rows, of which each may have any number of columns. rows: the same on
    every replica; None: all.
    """
    width = sum(tensor[:1].numel() if tensor.dim() > 1 else 1 for tensor in tensors)
    num_rows = len(tensors[0]) if rows is None else len(rows)
    # 4 bytes for each number: they are added up in float32, whatever the tensors' types.
    at_once = max(1, BLOCK_BYTES // (4 * width))
    for first in range(0, num_rows, at_once):
        end = min(first + at_once, num_rows)
        if rows is None:
            some = torch.arange(first, end, device=tensors[0].device)
        else:
            some = rows[first:end]
        selected = [tensor.index_select(0, some) for tensor in tensors]
        parts = [part.float().reshape(len(some), -1) for part in selected]
        mean = torch.cat(parts, dim=1)
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        means = mean.split([part.shape[1] for part in parts], dim=1)
        for tensor, before, part in zip(tensors, selected, means, strict=True):
            tensor.index_copy_(0, some, part.reshape(before.shape).to(tensor.dtype))
