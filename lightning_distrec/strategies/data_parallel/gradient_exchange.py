"""How DistributedDataParallel exchanges gradients: its settings, 16 bits, torch's PowerSGD, and
sparse gradients.

Sparse gradients, those of nn.Embedding(sparse=True), are averaged as rows or as dense tensors. As
rows, every rank gathers the rows and values of all ranks and adds them up, which is fast where a
step looks up few of many rows, and slow where it looks up most.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec._compat.tensors import rows_and_values
from lightning_distrec._compat.torch import leave_optimizers_in_backward
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.option_values import plain_fields

MEMORIES = ("p_memory_dict", "q_memory_dict", "error_dict")
"""What torch's state keeps for each bucket: two matrices, the same on all ranks, and the rank's
error feedback."""


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """How gradients are compressed. Source:
    torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook."""

    matrix_rank: int = 4
    """Rank of the two matrices that are sent in place of a gradient. The smaller, the fewer bytes,
    the less exact."""
    start_step: int = 1000
    """Optimizer steps with uncompressed gradients before the first compressed one."""

    def __post_init__(self) -> None:
        plain_fields(self)
        for name, minimum in (("matrix_rank", 1), ("start_step", 0)):
            value = getattr(self, name)
            if value < minimum:
                raise ConfigError(f"powersgd: {name}={value} must be at least {minimum}.")


def sent_numbers(shape: torch.Size, matrix_rank: int) -> int:
    """Return how many numbers are sent for a gradient of this shape: of its factors where these are
    less than half."""
    num_rows = shape[0] if shape else 1
    num_columns = shape.numel() // max(num_rows, 1)
    factors = (num_rows + num_columns) * min(num_rows, num_columns, matrix_rank)
    return factors if factors * 2 < shape.numel() else shape.numel()


class PowerSGD:
    """Compresses gradients in one run: torch's hook for DistributedDataParallel, and its state in
    checkpoints. torch keeps its state by bucket, so that `GradientExchange` keeps the buckets."""

    def __init__(self, module: nn.Module, options: PowerSGDOptions, bucket_cap_mb: float) -> None:
        # DDP asks hooks for their names
        self.__name__ = self.__qualname__ = "powersgd"
        self._module = module
        self._bucket_cap_mb = bucket_cap_mb
        self._layout = ""
        """What DDP makes its buckets of."""
        self._state = PowerSGDState(None, options.matrix_rank, orthogonalization_epsilon=1e-8)
        # Its constructor takes no less than 2, after which DDP's buckets usually stay.
        self._state.start_powerSGD_iter = options.start_step
        shapes = [p.shape for p in module.parameters() if p.requires_grad]
        sent = sum(sent_numbers(shape, options.matrix_rank) for shape in shapes)
        rank_zero_info(
            f"ddp_tuned: from step {options.start_step} on, PowerSGD sends {sent:,} in place of "
            f"{sum(shape.numel() for shape in shapes):,} numbers of gradients: training is not the "
            "same as under ddp."
        )

    def begin_wrapper(self) -> None:
        """Note what DDP makes its buckets of. Others than before begin without error feedback."""
        parameters = self._module.named_parameters()
        learning = [(name, *p.shape) for name, p in parameters if p.requires_grad]
        layout = f"{self._bucket_cap_mb} MiB: {learning}"
        if self._layout != layout:
            self._layout = layout
            for memory in MEMORIES:
                getattr(self._state, memory).clear()
        # The first matrices are drawn alike in a run that resumes here.
        self._state.rng.seed(0)

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Collective. Average a bucket."""
        if self._state.iter < self._state.start_powerSGD_iter:
            return powerSGD_hook(self._state, bucket)
        # torch takes the first dim for rows, which single numbers have not.
        gradients = [gradient.view(gradient.shape or (1,)) for gradient in bucket.gradients()]
        with_dims: Any = SimpleNamespace(
            index=bucket.index,
            buffer=bucket.buffer,
            gradients=lambda: gradients,
            is_last=bucket.is_last,
        )
        averaged = powerSGD_hook(self._state, with_dims)
        # Awaited, as its second and third all-reduce start in threads of gloo, which would order
        # those of two buckets differently on different ranks.
        averaged.wait()
        return averaged

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank."""
        state: dict[str, Any] = {"steps": self._state.iter, "layout": self._layout}
        for memory in MEMORIES:
            tensors: dict[int, Tensor] = getattr(self._state, memory)
            state[memory] = {i: tensor.detach().cpu().clone() for i, tensor in tensors.items()}
        return state

    def restore(
        self, rank_state: Mapping[str, Any] | None, rank_0_state: Mapping[str, Any] | None
    ) -> None:
        """Continue from a checkpoint; None: of another number of ranks, or not in the
        checkpoint."""
        saved: Mapping[str, Any] = rank_state or rank_0_state or {"steps": 0, "layout": ""}
        self._state.iter = int(saved["steps"])
        matches = saved["layout"] == self._layout
        # The two matrices are the same on all ranks; error feedback is a rank's own and means
        # nothing to another.
        memories = MEMORIES if rank_state else MEMORIES[:-1]
        device = next(self._module.parameters()).device
        for memory in memories if matches else ():
            tensors = {i: tensor.to(device) for i, tensor in saved[memory].items()}
            setattr(self._state, memory, tensors)
        if saved.get("error_dict") and not (matches and rank_state):
            rank_zero_warn(
                "powersgd: the checkpoint was written by another number of ranks, or with other "
                "buckets, and what the compression had left over on each of them is dropped."
            )


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
        if self.bucket_cap_mb <= 0:
            raise ConfigError(f"bucket_cap_mb={self.bucket_cap_mb!r}: must be above 0 MiB.")

    def wrap(
        self,
        module: nn.Module,
        device_ids: list[int] | None,
        send_weights: bool,
        compression: PowerSGD | None,
    ) -> DistributedDataParallel:
        """Collective. Return the module in DDP. send_weights: whether rank 0's are sent to the
        others."""
        if compression is not None:
            # It warns of a walk over the graph, where all parameters are used.
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        ddp = DistributedDataParallel(
            module,
            device_ids=device_ids,
            bucket_cap_mb=self.bucket_cap_mb,
            # DDP does not order its buckets again where it looks for unused parameters.
            find_unused_parameters=self.find_unused_parameters or compression is not None,
            static_graph=self.static_graph,
            # Gradients are views of the buckets: one copy of them fewer in memory and in each step.
            gradient_as_bucket_view=True,
            init_sync=send_weights,
        )
        leave_optimizers_in_backward(ddp)
        # A hook replaces DDP's own exchange, so that only one can be registered: compression comes
        # first.
        if compression is not None:
            compression.begin_wrapper()
            ddp.register_comm_hook(None, compression)
        elif self.comm_dtype != "fp32":
            ddp.register_comm_hook(None, _picklable_hook(_compress, DTYPES[self.comm_dtype]))
        elif sparse_weights(ddp.module):
            ddp.register_comm_hook(None, sparse_hook(self.sparse_grads))
        return ddp


def sparse_weights(module: nn.Module) -> dict[Tensor, str]:
    """Return the weights whose gradients are sparse, and the paths of the modules that own them."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    paths = {}
    for path, child in module.named_modules():
        if isinstance(child, kinds) and child.sparse:
            paths[child.weight] = path
    return paths


def refuse_gradients(module: nn.Module, comm_dtype: CommDtype, backend: str) -> None:
    """Raise ConfigError or UnsupportedError where gradients of this module cannot be exchanged
    so."""
    if comm_dtype != "fp32" and backend not in BACKENDS:
        backends = ", ".join(BACKENDS)
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: {backend} may not add up 16-bit numbers. Use {backends}."
        )
    sparse = list(sparse_weights(module).values())
    if sparse and comm_dtype != "fp32":
        raise ConfigError(
            f"comm_dtype={comm_dtype!r}: '{sparse[0]}' has sparse gradients, which are sent as "
            "they are. Use 'fp32', or sparse=False for it."
        )
    if sparse and backend == "nccl":
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which NCCL does not add up. Use "
            "strategy='torchrec_sharded', which shards it and updates only the rows that were "
            "looked up, or sparse=False for it."
        )


def refuse_powersgd(module: nn.Module, precision: str) -> None:
    """Raise ConfigError: a gradient is sparse; overflows would stay."""
    if precision == "16-mixed":
        raise ConfigError(
            "powersgd with Trainer(precision='16-mixed'): what the compression leaves over would "
            "not be finite after gradients overflow. Use 'bf16-mixed', or no powersgd."
        )
    sparse = list(sparse_weights(module).values())
    if sparse:
        raise ConfigError(
            f"powersgd: '{sparse[0]}' has sparse gradients. Set sparse=False for it, or no "
            "powersgd."
        )


def sparse_hook(sparse_grads: SparseGrads) -> Hook:
    """Return a hook that averages a bucket over ranks: sparse gradients as rows, or as dense
    tensors."""
    return _picklable_hook(_average, sparse_grads)


def _picklable_hook(function: Callable[..., Any], argument: Any) -> Hook:
    # torch.save(trainer.model) pickles hooks, and a local function cannot be pickled. DDP asks
    # hooks for their names, which a partial has none of.
    hook: Any = partial(function, argument)
    hook.__name__ = hook.__qualname__ = function.__name__
    return hook  # type: ignore[no-any-return]


def _compress(dtype: torch.dtype, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in a type of 16 bits."""
    # torch's own hooks do the same, but DDP refuses bf16_compress_hook by its name where there is
    # no NCCL.
    gradients = bucket.buffer()
    small = gradients.to(dtype).div_(dist.get_world_size())  # first, so that sums do not overflow
    sent: Any = dist.all_reduce(small, async_op=True)
    return sent.get_future().then(lambda future: gradients.copy_(future.value()[0]))


def _average(
    sparse_grads: SparseGrads, _: Any, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    if not gradients.is_sparse:  # as torch does, whose place a hook takes
        sent: Any = dist.all_reduce(gradients.div_(dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])
    # No sparse tensor may reach torch's own all-reduce: over gloo, in DDP, it corrupts memory once
    # in some thousand steps (torch 2.13: "malloc(): unaligned tcache chunk detected", or a
    # segmentation fault).
    return _average_rows(gradients) if sparse_grads == "sparse" else _average_dense(gradients)


def _average_dense(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Send a dense tensor with a further column, which is 1 in rows that were looked up."""
    shape = gradients.shape
    num_ranks = dist.get_world_size()
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
    """Gather rows and values, padded to those of the rank with the most rows. Only the numbers of
    rows are awaited."""
    shape = gradients.shape
    num_ranks = dist.get_world_size()
    rows, values = rows_and_values(gradients.coalesce())
    counts = [rows.new_empty(1) for _ in range(num_ranks)]
    dist.all_gather(counts, rows.new_tensor([len(rows)]))
    # all_gather needs tensors of one shape, and ranks look up different numbers of rows.
    max_count = int(max(counts))
    all_rows, rows_gathered = _gather(rows, max_count)
    all_values, values_gathered = _gather(values, max_count)

    def add_up(_: Any) -> Tensor:
        gathered = zip(map(int, counts), all_rows, all_values, strict=True)
        first, *remote = [
            _coalesced(rows[:count], values[:count], shape) for count, rows, values in gathered
        ]
        return sum(remote, start=first).coalesce().div_(num_ranks)

    return torch.futures.collect_all([rows_gathered, values_gathered]).then(add_up)


def _gather(local: Tensor, length: int) -> tuple[list[Tensor], torch.futures.Future[Any]]:
    """Return all ranks' tensors, each padded to `length`, which hold their values once the future
    is done."""
    padded = torch.cat([local, local.new_zeros(length - len(local), *local.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    sent: Any = dist.all_gather(gathered, padded, async_op=True)
    return gathered, sent.get_future()


def _coalesced(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(
        rows[None], values, shape, is_coalesced=True, check_invariants=False
    )


def refuse_debug_detail() -> None:
    """Raise ConfigError: with TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP over gloo ends the process (torch
    2.13)."""
    is_detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    if is_detail and dist.get_world_size() > 1 and "gloo" in dist.get_backend():
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: with it torch ends a process whose "
            "DistributedDataParallel exchanges by gloo, by signal 11. Set INFO; exchanges that "
            "differ between ranks are named without it."
        )


def name_option(text: str, strategy: str) -> str:
    """Return DDP's error about parameters without a gradient with the option of `strategy`; other
    errors stay."""
    if "Expected sparse gradient to be defined" in text:
        return (
            "a step looked up no row of an nn.Embedding(sparse=True), and DDP sends sparse "
            "gradients in every step. Look up all of them in every step, set sparse=False, or use "
            "strategy='torchrec_sharded'."
        )
    # Lightning would name its own DDPStrategy, which shards nothing.
    if "Expected to have finished reduction in the prior iteration" not in text:
        return text
    indices = re.search(r"Parameter indices which did not receive grad for rank \d+: [\d ]+", text)
    return (
        "the loss of the step before did not depend on some parameters of the module. If that is "
        "intended, set "
        f"{strategy}(find_unused_parameters=True).{f' {indices[0].strip()}.' if indices else ''}"
    )
