"""How DistributedDataParallel exchanges gradients: its settings, and 16-bit exchange."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.optimizers.sparse_weights import sparse_weights
from lightning_distrec.strategies.data_parallel.powersgd import PowerSGD
from lightning_distrec.strategies.data_parallel.sparse_gradients import SparseGrads, averaging, picklable_hook

CommDtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = ("gloo", "nccl")
"""Backends that add up 16-bit numbers: gloo was tested, with torch 2.13; NCCL was not."""


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """The settings with which DistributedDataParallel wraps a module."""

    bucket_cap_mb: float
    """Size of its buckets in MiB."""
    comm_dtype: CommDtype
    """The type in which dense gradients are sent and added up."""
    sparse_grads: SparseGrads
    """How gradients of nn.Embedding(sparse=True) are sent."""
    find_unused_parameters: bool
    static_graph: bool

    def wrap(
        self, module: nn.Module, device_ids: list[int] | None, send_weights: bool, compression: PowerSGD | None
    ) -> DistributedDataParallel:
        """Collective. Return the module in DDP. send_weights: whether rank 0's are sent to the others."""
        ddp = DistributedDataParallel(
            module,
            device_ids=device_ids,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            init_sync=send_weights,
        )
        if compression is not None:
            compression.begin_wrapper()
            ddp.register_comm_hook(None, compression)
        elif self.comm_dtype != "fp32":
            ddp.register_comm_hook(None, picklable_hook(_compress, DTYPES[self.comm_dtype]))
        elif sparse_weights(ddp.module):
            ddp.register_comm_hook(None, averaging(self.sparse_grads))
        return ddp


def check_exchange(comm_dtype: CommDtype, sparse_grads: SparseGrads) -> None:
    """Raise ConfigError: a value is unknown."""
    for name, value, allowed in (
        ("comm_dtype", comm_dtype, get_args(CommDtype)),
        ("sparse_grads", sparse_grads, get_args(SparseGrads)),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is not known. Use one of {', '.join(map(repr, allowed))}.")


def refuse_gradients(module: nn.Module, comm_dtype: CommDtype, backend: str) -> None:
    """Raise ConfigError or UnsupportedError where gradients of this module cannot be exchanged so."""
    if comm_dtype != "fp32" and backend not in BACKENDS:
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: {backend} is not known to add up 16-bit numbers. Use 'fp32', or one of "
            f"{', '.join(BACKENDS)}."
        )
    sparse = list(sparse_weights(module).values())
    if sparse and comm_dtype != "fp32":
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: '{sparse[0]}' has sparse gradients, which are sent as they are. Use "
            "comm_dtype='fp32', or sparse=False for it."
        )
    if sparse and backend == "nccl":
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which NCCL does not add up. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def _compress(dtype: torch.dtype, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in a type of 16 bits.

    torch's own hooks do the same, but DDP refuses bf16_compress_hook by its name where there is no NCCL.
    """
    gradients = bucket.buffer()
    small = gradients.to(dtype).div_(dist.get_world_size())  # first, so that sums do not overflow
    sent: Any = dist.all_reduce(small, async_op=True)
    return sent.get_future().then(lambda future: gradients.copy_(future.value()[0]))
