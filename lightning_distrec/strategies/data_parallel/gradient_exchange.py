"""How DistributedDataParallel exchanges gradients: its settings, and gradients that travel as 16-bit numbers."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.strategies.data_parallel.sparse_gradients import Hook, SparseGrads, averaging, sparse_weights

CommDtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = ("gloo", "nccl")
"""Those that add up 16-bit numbers: gloo was tried, with torch 2.13; NCCL was not run."""
BATCHES_COPIES = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters


@dataclass(frozen=True)
class ExchangeSetting:
    """One way to exchange gradients; all of them give the same numbers, but for the order in which they are added."""

    bucket_cap_mb: float = 25
    """Gradients travel in buckets of about so many MiB."""
    batched_grad_copy: bool = False
    """Whether they are copied there all at once, not one by one; torch 2.13 can."""
    dense_bytes: float = 0
    """Sparse gradients of tables of at most so many bytes travel as dense ones."""

    def wrap(self, module: nn.Module, is_first: bool, **more: Any) -> DistributedDataParallel:
        """Collective. Return the module in DDP; is_first: rank 0's weights are sent to the others."""
        if self.batched_grad_copy:
            more["batched_grad_copy"] = True
        more |= {"bucket_cap_mb": self.bucket_cap_mb, "init_sync": is_first}
        return DistributedDataParallel(module, gradient_as_bucket_view=True, **more)


def check_exchange(comm_dtype: CommDtype, sparse_grads: SparseGrads) -> None:
    """Raise ConfigError: one of them is not known."""
    for name, value, known in (
        ("comm_dtype", comm_dtype, get_args(CommDtype)),
        ("sparse_grads", sparse_grads, get_args(SparseGrads)),
    ):
        if value not in known:
            raise ConfigError(f"{name}={value!r} is not known. Use one of {', '.join(map(repr, known))}.")


def refuse_gradients(module: nn.Module, comm_dtype: CommDtype, backend: str) -> None:
    """Raise where gradients of this module cannot travel as asked: ConfigError or UnsupportedError."""
    if comm_dtype != "fp32" and backend not in BACKENDS:
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: {backend} is not known to add up 16-bit numbers. Use 'fp32', or one of "
            f"{', '.join(BACKENDS)}."
        )
    sparse = list(sparse_weights(module).values())
    if sparse and comm_dtype != "fp32":
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: '{sparse[0]}' has sparse gradients, which travel as they are. Use "
            "comm_dtype='fp32', or sparse=False for it."
        )
    if sparse and backend == "nccl":
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which NCCL does not add up. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def exchange_as(ddp: DistributedDataParallel, comm_dtype: CommDtype, dense_bytes: float) -> None:
    """Let gradients travel as 16-bit numbers, or sparse ones as rows or dense tensors; else as torch does."""
    if comm_dtype != "fp32":
        ddp.register_comm_hook(None, _compressing(DTYPES[comm_dtype]))
    elif sparse_weights(ddp.module):
        ddp.register_comm_hook(None, averaging(dense_bytes))


def _compressing(dtype: torch.dtype) -> Hook:
    # torch's own hooks for this divide, send and copy alike, but bf16's is refused by its name where there is no NCCL.
    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        small = gradients.to(dtype).div_(dist.get_world_size())  # first, so that sums do not overflow
        sent: Any = dist.all_reduce(small, async_op=True)
        return sent.get_future().then(lambda future: gradients.copy_(future.value()[0]))

    return hook
