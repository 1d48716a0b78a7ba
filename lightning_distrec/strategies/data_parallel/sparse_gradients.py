"""Averages sparse gradients, those of nn.Embedding(sparse=True), over ranks: as rows, or as dense tensors.

As rows: every rank gathers the rows and values of all ranks and adds them up, which is fast where a step looks up few
of many rows, and slow where it looks up most. torch's own all-reduce of sparse tensors over gloo does this too, but in
DistributedDataParallel it corrupts memory once in some thousand steps (torch 2.13: "malloc(): unaligned tcache chunk
detected", or a segmentation fault), so that no sparse tensor reaches it from here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec._compat.tensors import rows_and_values

SparseGrads = Literal["sparse", "dense"]
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
"""What DistributedDataParallel calls for every bucket of gradients."""


def averaging(sparse_grads: SparseGrads) -> Hook:
    """Return a hook that averages a bucket over ranks: sparse gradients as rows, or as dense tensors."""
    return picklable_hook(_average, sparse_grads)


def picklable_hook(function: Callable[..., Any], argument: Any) -> Hook:
    """Return a hook for DDP that calls `function` with this argument first; torch.save(trainer.model) pickles it.

    A local function cannot be pickled, and DDP asks hooks for their names, which a partial has none of.
    """
    hook: Any = partial(function, argument)
    hook.__name__ = hook.__qualname__ = function.__name__
    return hook  # type: ignore[no-any-return]


def _average(sparse_grads: SparseGrads, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    if not gradients.is_sparse:  # as torch does, whose place a hook takes
        sent: Any = dist.all_reduce(gradients.div_(dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])
    return _average_of_rows(gradients) if sparse_grads == "sparse" else _average_of_dense(gradients)


def _average_of_dense(gradients: Tensor) -> torch.futures.Future[Tensor]:
    shape, num_ranks = gradients.shape, dist.get_world_size()
    sent: Any = dist.all_reduce(_with_marks(gradients), async_op=True)
    return sent.get_future().then(lambda future: _marked_rows(future.value()[0], shape).div_(num_ranks))


def _average_of_rows(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Gather rows and values, padded to those of the rank with the most rows. Only the numbers of rows are awaited."""
    shape, num_ranks = gradients.shape, dist.get_world_size()
    rows, values = rows_and_values(gradients.coalesce())
    counts = [rows.new_empty(1) for _ in range(num_ranks)]
    dist.all_gather(counts, rows.new_tensor([len(rows)]))
    max_count = int(max(counts))
    all_rows, rows_gathered = _gather(rows, max_count)
    all_values, values_gathered = _gather(values, max_count)

    def added(_: Any) -> Tensor:
        gathered = zip(map(int, counts), all_rows, all_values, strict=True)
        first, *remote = [_coalesced(r[:count], v[:count], shape) for count, r, v in gathered]
        return sum(remote, start=first).coalesce().div_(num_ranks)

    return torch.futures.collect_all([rows_gathered, values_gathered]).then(added)


def _gather(local: Tensor, length: int) -> tuple[list[Tensor], torch.futures.Future[Any]]:
    """Return all ranks' tensors, each padded to `length`, which hold their values once the future is done."""
    padded = torch.cat([local, local.new_zeros(length - len(local), *local.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    sent: Any = dist.all_gather(gathered, padded, async_op=True)
    return gathered, sent.get_future()


def _with_marks(sparse: Tensor) -> Tensor:
    """Return a sparse gradient as a dense tensor, with a further column that is 1 in rows that were looked up."""
    rows, values = rows_and_values(sparse)
    dense = torch.zeros(sparse.shape[0], sparse.shape[1] + 1, dtype=values.dtype, device=values.device)
    dense[:, :-1].index_add_(0, rows, values)
    dense[rows, -1] = 1
    return dense


def _marked_rows(dense: Tensor, shape: torch.Size) -> Tensor:
    """Return the rows that any rank has marked, as a sparse gradient."""
    rows = dense[:, -1].nonzero()[:, 0]
    return _coalesced(rows, dense[rows, :-1], shape)


def _coalesced(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
