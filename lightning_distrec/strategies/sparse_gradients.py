"""Sparse gradients, of nn.Embedding(sparse=True), travel as indices and values or as a dense tensor.

gloo gathers the indices and values of all ranks, and each rank adds them up: that is slow where ranks look up most rows
of a table, and fast where they look up few of many.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distrec._compat import rows_and_values

SparseGrads = Literal["auto", "sparse", "dense"]
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
"""What DistributedDataParallel calls for every bucket of gradients."""
AUTO_BYTES = 16 * 2**20
"""Larger tables are not tried as dense tensors."""
ALL_BYTES = 2**63
TRIAL_STEPS = 8
"""Steps that are timed each way."""


def sparse_weights(module: nn.Module) -> dict[Tensor, str]:
    """Return the weights whose gradients are sparse, and the paths of their modules."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {part.weight: path for path, part in module.named_modules() if isinstance(part, kinds) and part.sparse}


def dense_bytes_of(sparse_grads: SparseGrads) -> float:
    """Return up to which size of a table its gradients travel as dense tensors; "auto" begins as torch does."""
    return ALL_BYTES if sparse_grads == "dense" else 0


def is_worth_a_trial(weights: Iterable[Tensor]) -> bool:
    """Whether there is a table small enough to be tried."""
    return any(weight.requires_grad and weight.nbytes <= AUTO_BYTES for weight in weights)


def densifying(dense_bytes: float) -> Hook:
    """Return what averages a bucket over ranks; sparse gradients of at most so many bytes as dense tensors."""

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients, num_ranks = bucket.buffer(), dist.get_world_size()
        if not gradients.is_sparse or gradients.numel() * gradients.element_size() > dense_bytes:
            # torch's own, which a hook takes the place of
            plain: Any = dist.all_reduce(gradients.div_(num_ranks), async_op=True)
            return plain.get_future().then(lambda future: future.value()[0])
        shape = gradients.shape
        sent: Any = dist.all_reduce(_with_marks(gradients), async_op=True)
        return sent.get_future().then(lambda future: _marked_rows(future.value()[0], shape).div_(num_ranks))

    return hook


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
    return torch.sparse_coo_tensor(rows[None], dense[rows, :-1], shape, is_coalesced=True, check_invariants=False)


def said_of(seconds: list[float]) -> str:
    """Return what is said of the steps of the slowest rank with sparse, and with dense, exchange."""
    sparse, dense = (f"{1e3 * value:.2f} ms" for value in seconds)
    kept = "sparse" if seconds[0] <= seconds[1] else "dense"
    return f"ddp_tuned: sparse gradients travel as {kept} tensors: a step took {sparse} as sparse, {dense} as dense."
