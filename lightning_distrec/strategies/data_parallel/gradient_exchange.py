"""How DistributedDataParallel exchanges gradients: its settings, 16 bits, and sparse gradients.

Sparse gradients, those of nn.Embedding(sparse=True), are averaged as rows or as dense tensors. As rows, every rank
gathers the rows and values of all ranks and adds them up, which is fast where a step looks up few of many rows, and
slow where it looks up most.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec._compat.tensors import rows_and_values
from lightning_distrec._compat.torch import leave_optimizers_in_backward
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.option_values import check_choice, plain_fields

CommDtype = Literal["fp32", "bf16", "fp16"]
SparseGrads = Literal["sparse", "dense"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = ("gloo", "nccl")
"""Backends that add up 16-bit numbers: gloo was tested, with torch 2.13; NCCL was not."""
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
"""What DistributedDataParallel calls for every bucket of gradients."""


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

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("comm_dtype", self.comm_dtype, get_args(CommDtype))
        check_choice("sparse_grads", self.sparse_grads, get_args(SparseGrads))
        if self.bucket_cap_mb <= 0:
            raise ConfigError(f"bucket_cap_mb={self.bucket_cap_mb!r}: must be above 0 MiB.")

    def wrap(self, module: nn.Module, device_ids: list[int] | None, send_weights: bool) -> DistributedDataParallel:
        """Collective. Return the module in DDP. send_weights: whether rank 0's are sent to the others."""
        ddp = DistributedDataParallel(
            module,
            device_ids=device_ids,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            # Gradients are views of the buckets: one copy of them fewer in memory and in each step.
            gradient_as_bucket_view=True,
            init_sync=send_weights,
        )
        leave_optimizers_in_backward(ddp)
        if self.comm_dtype != "fp32":
            ddp.register_comm_hook(None, _picklable_hook(_compress, DTYPES[self.comm_dtype]))
        elif sparse_weights(ddp.module):
            ddp.register_comm_hook(None, sparse_hook(self.sparse_grads))
        return ddp


def sparse_weights(module: nn.Module) -> dict[Tensor, str]:
    """Return the weights whose gradients are sparse, and the paths of the modules that own them."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {child.weight: path for path, child in module.named_modules() if isinstance(child, kinds) and child.sparse}


def refuse_gradients(module: nn.Module, comm_dtype: CommDtype, backend: str) -> None:
    """Raise ConfigError or UnsupportedError where gradients of this module cannot be exchanged so."""
    if comm_dtype != "fp32" and backend not in BACKENDS:
        backends = ", ".join(BACKENDS)
        raise ConfigError(f"comm_dtype={comm_dtype!r}: {backend} may not add up 16-bit numbers. Use {backends}.")
    sparse = list(sparse_weights(module).values())
    if sparse and comm_dtype != "fp32":
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: '{sparse[0]}' has sparse gradients, which are sent as they are. Use 'fp32', "
            "or sparse=False for it."
        )
    if sparse and backend == "nccl":
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which NCCL does not add up. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def sparse_hook(sparse_grads: SparseGrads) -> Hook:
    """Return a hook that averages a bucket over ranks: sparse gradients as rows, or as dense tensors."""
    return _picklable_hook(_average, sparse_grads)


def _picklable_hook(function: Callable[..., Any], argument: Any) -> Hook:
    # torch.save(trainer.model) pickles hooks, and a local function cannot be pickled. DDP asks hooks for their names,
    # which a partial has none of.
    hook: Any = partial(function, argument)
    hook.__name__ = hook.__qualname__ = function.__name__
    return hook  # type: ignore[no-any-return]


def _compress(dtype: torch.dtype, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in a type of 16 bits."""
    # torch's own hooks do the same, but DDP refuses bf16_compress_hook by its name where there is no NCCL.
    gradients = bucket.buffer()
    small = gradients.to(dtype).div_(dist.get_world_size())  # first, so that sums do not overflow
    sent: Any = dist.all_reduce(small, async_op=True)
    return sent.get_future().then(lambda future: gradients.copy_(future.value()[0]))


def _average(sparse_grads: SparseGrads, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    if not gradients.is_sparse:  # as torch does, whose place a hook takes
        sent: Any = dist.all_reduce(gradients.div_(dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])
    # No sparse tensor may reach torch's own all-reduce: over gloo, in DDP, it corrupts memory once in some thousand
    # steps (torch 2.13: "malloc(): unaligned tcache chunk detected", or a segmentation fault).
    return _average_rows(gradients) if sparse_grads == "sparse" else _average_dense(gradients)


def _average_dense(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Send a dense tensor with a further column, which is 1 in rows that were looked up."""
    shape, num_ranks = gradients.shape, dist.get_world_size()
    rows, values = rows_and_values(gradients)
    marked = torch.zeros(shape[0], shape[1] + 1, dtype=values.dtype, device=values.device)
    marked[:, :-1].index_add_(0, rows, values)
    # The further column is summed too: above 0 it marks rows that any rank has looked up.
    marked[rows, -1] = 1

    def keep_marked_rows(future: Any) -> Tensor:
        dense = future.value()[0]
        marked_rows = dense[:, -1].nonzero()[:, 0]
        return _coalesced(marked_rows, dense[marked_rows, :-1], shape).div_(num_ranks)

    sent: Any = dist.all_reduce(marked, async_op=True)
    return sent.get_future().then(keep_marked_rows)


def _average_rows(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Gather rows and values, padded to those of the rank with the most rows. Only the numbers of rows are awaited."""
    shape, num_ranks = gradients.shape, dist.get_world_size()
    rows, values = rows_and_values(gradients.coalesce())
    counts = [rows.new_empty(1) for _ in range(num_ranks)]
    dist.all_gather(counts, rows.new_tensor([len(rows)]))
    # all_gather needs tensors of one shape, and ranks look up different numbers of rows.
    max_count = int(max(counts))
    all_rows, rows_gathered = _gather(rows, max_count)
    all_values, values_gathered = _gather(values, max_count)

    def add_up(_: Any) -> Tensor:
        gathered = zip(map(int, counts), all_rows, all_values, strict=True)
        first, *remote = [_coalesced(rows[:count], values[:count], shape) for count, rows, values in gathered]
        return sum(remote, start=first).coalesce().div_(num_ranks)

    return torch.futures.collect_all([rows_gathered, values_gathered]).then(add_up)


def _gather(local: Tensor, length: int) -> tuple[list[Tensor], torch.futures.Future[Any]]:
    """Return all ranks' tensors, each padded to `length`, which hold their values once the future is done."""
    padded = torch.cat([local, local.new_zeros(length - len(local), *local.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    sent: Any = dist.all_gather(gathered, padded, async_op=True)
    return gathered, sent.get_future()


def _coalesced(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def refuse_debug_detail() -> None:
    """Raise ConfigError: with TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP over gloo ends the process (torch 2.13)."""
    is_detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    if is_detail and dist.get_world_size() > 1 and "gloo" in dist.get_backend():
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: with it torch ends a process whose DistributedDataParallel exchanges by "
            "gloo, by signal 11. Set INFO; exchanges that differ between ranks are named without it."
        )


def name_option(text: str, strategy: str) -> str:
    """Return DDP's error about parameters without a gradient with the option of `strategy`; other errors stay."""
    # Lightning would name its own DDPStrategy, which shards nothing.
    if "Expected to have finished reduction in the prior iteration" not in text:
        return text
    indices = re.search(r"Parameter indices which did not receive grad for rank \d+: [\d ]+", text)
    return (
        "the loss of the step before did not depend on some parameters of the module. If that is intended, set "
        f"{strategy}(find_unused_parameters=True).{f' {indices[0].strip()}.' if indices else ''}"
    )
