"""Gradients compressed by torch's PowerSGD, whose state is in checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_distrec.errors import ConfigError

MEMORIES = ("p_memory_dict", "q_memory_dict", "error_dict")
"""What torch's state keeps for each bucket: two matrices, the same on all ranks, and the rank's error feedback."""


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """How gradients are compressed. Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook."""

    matrix_rank: int = 4
    """Rank of the two matrices that are sent in place of a gradient. The smaller, the fewer bytes, the less exact."""
    start_step: int = 1000
    """Optimizer steps with uncompressed gradients before the first compressed one."""

    def __post_init__(self) -> None:
        for name, minimum in (("matrix_rank", 1), ("start_step", 0)):
            if (value := getattr(self, name)) < minimum:
                raise ConfigError(f"powersgd: {name}={value} must be at least {minimum}.")


def sent_numbers(shape: torch.Size, matrix_rank: int) -> int:
    """Return how many numbers are sent for a gradient of this shape: of its factors where these are less than half."""
    num_rows = shape[0] if shape else 1
    num_columns = shape.numel() // max(num_rows, 1)
    factors = (num_rows + num_columns) * min(num_rows, num_columns, matrix_rank)
    return factors if factors * 2 < shape.numel() else shape.numel()


def _make_bucket(name: str, gradients: list[Tensor], is_last: bool) -> Any:
    """Return what torch's hook reads of a dist.GradBucket, with copies of these gradients."""
    values = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = values.split([gradient.numel() for gradient in gradients])
    copies = [part.view(gradient.shape or (1,)) for part, gradient in zip(parts, gradients, strict=True)]
    return SimpleNamespace(index=lambda: name, buffer=lambda: values, gradients=lambda: copies, is_last=lambda: is_last)


class PowerSGD:
    """Compresses gradients in one run: a hook for DistributedDataParallel, and its state in checkpoints.

    torch keeps its state by bucket, and DDP's buckets change after the first backward, on resuming, and where layers
    unfreeze. So torch's hook gets buckets of the parameters in the module's order, once DDP has all gradients.
    """

    def __init__(self, module: nn.Module, options: PowerSGDOptions, bucket_cap_mb: float) -> None:
        self.__name__ = self.__qualname__ = "powersgd"  # DDP asks hooks for their names
        self._module = module
        self._bucket_bytes = bucket_cap_mb * 2**20
        self._buckets: dict[str, list[nn.Parameter]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._state = PowerSGDState(None, options.matrix_rank, orthogonalization_epsilon=1e-8)
        self._state.start_powerSGD_iter = options.start_step
        shapes = [p.shape for p in module.parameters() if p.requires_grad]
        sent = sum(sent_numbers(shape, options.matrix_rank) for shape in shapes)
        rank_zero_info(
            f"ddp_tuned: from step {options.start_step} on, PowerSGD sends {sent:,} in place of "
            f"{sum(shape.numel() for shape in shapes):,} numbers of gradients: training is not the same as under ddp."
        )

    def begin_wrapper(self) -> None:
        """Note which parameters learn. Buckets with other parameters than before begin without error feedback."""
        names: dict[tuple[torch.dtype, int], list[str]] = {}
        parameters = dict(self._module.named_parameters())
        # By the module's order and bucket_cap_mb alone: the same buckets in every run, which DDP's are not.
        ends = accumulate(parameter.nbytes for parameter in parameters.values())
        for (name, parameter), end in zip(parameters.items(), ends, strict=True):
            if parameter.requires_grad:
                names.setdefault((parameter.dtype, int(end // self._bucket_bytes)), []).append(name)
        self._buckets = {" ".join(members): [parameters[name] for name in members] for members in names.values()}
        self._state.rng.seed(0)  # the first matrices are drawn alike in a run that resumes here
        for memory in MEMORIES:
            tensors = getattr(self._state, memory)
            for name in set(tensors) - set(self._buckets):
                del tensors[name]

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Collective. Average a bucket: at once before the first compressed step, later at the last one of backward."""
        if self._state.iter < self._state.start_powerSGD_iter:
            return powerSGD_hook(self._state, bucket)
        self._gradients |= {id(p): g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        if bucket.is_last():
            self._average()
        # DDP wants a future for every bucket. Its buffer is filled by `_average` before backward ends, in place.
        averaged: torch.futures.Future[Tensor] = torch.futures.Future()
        averaged.set_result(bucket.buffer())
        return averaged

    def _average(self) -> None:
        final = list(self._buckets)[-1]
        for name, parameters in self._buckets.items():
            gradients = [self._gradients[id(parameter)] for parameter in parameters]
            bucket = _make_bucket(name, gradients, name == final)
            # Awaited, as its second and third all-reduce start in threads of gloo, which would order those of two
            # buckets differently on different ranks.
            powerSGD_hook(self._state, bucket).wait()
            for gradient, average in zip(gradients, bucket.gradients(), strict=True):
                gradient.copy_(average.view(gradient.shape))
        self._gradients.clear()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank."""
        tensors = {
            memory: {name: tensor.detach().cpu().clone() for name, tensor in getattr(self._state, memory).items()}
            for memory in MEMORIES
        }
        return {"steps": self._state.iter, **tensors}

    def restore(self, rank_state: Mapping[str, Any] | None, rank_0_state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint; None: of another number of ranks, or not in the checkpoint."""
        saved: Mapping[str, Any] = rank_state or rank_0_state or {"steps": 0} | {memory: {} for memory in MEMORIES}
        self._state.iter = int(saved["steps"])
        for memory in MEMORIES if rank_state else MEMORIES[:-1]:
            # The two matrices are the same on all ranks; error feedback is a rank's own and means nothing to another.
            tensors: dict[str, Tensor] = saved[memory]
            matching = {name: tensors[name].to(ps[0]) for name, ps in self._buckets.items() if name in tensors}
            setattr(self._state, memory, matching)
        if saved["error_dict"] and saved["error_dict"].keys() != self._state.error_dict.keys():
            rank_zero_warn(
                "powersgd: the checkpoint was written by another number of ranks, or with other buckets, and what the "
                "compression had left over on each of them is dropped."
            )
