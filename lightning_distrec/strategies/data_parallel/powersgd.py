"""Gradients compressed by PowerSGD, with its state by parameter, for checkpoints and new buckets."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_distrec.errors import ConfigError, DistRecError
from lightning_distrec.optimizers.sparse_weights import sparse_weights

MIN_COMPRESSION_RATE = 2
"""Matrices that would not be sent in this many times fewer numbers are sent as they are; torch's default."""
SETTLING_STEPS = 3
"""Backwards after which DistributedDataParallel has its final buckets: it rebuilds them after the first one."""


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """How gradients are compressed. Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook."""

    matrix_rank: int = 4
    """Rank of the two matrices that are sent in place of a gradient. The smaller, the fewer bytes, the less exact."""

    start_step: int = 1000
    """Optimizer steps with uncompressed gradients before the first compressed one."""

    def __post_init__(self) -> None:
        if self.matrix_rank < 1:
            raise ConfigError(f"powersgd: matrix_rank={self.matrix_rank} must be at least 1.")
        if self.start_step < 0:
            raise ConfigError(f"powersgd: start_step={self.start_step} must be at least 0.")


@dataclass(frozen=True)
class Factors:
    """The shape of a gradient as a matrix, and the rank of its factors."""

    num_rows: int
    num_columns: int
    rank: int

    @property
    def pays(self) -> bool:
        """Whether the matrix is compressed."""
        sent = (self.num_rows + self.num_columns) * self.rank
        return sent * MIN_COMPRESSION_RATE < self.num_rows * self.num_columns


def factors_of(shape: torch.Size, matrix_rank: int) -> Factors:
    """Return what a gradient of this shape is sent as."""
    num_rows = shape[0]
    num_columns = shape.numel() // max(num_rows, 1)
    return Factors(num_rows, num_columns, min(num_rows, num_columns, matrix_rank))


def sent_numbers(shape: torch.Size, matrix_rank: int) -> int:
    """Return how many numbers are sent for a gradient of this shape."""
    factors = factors_of(shape, matrix_rank)
    return (factors.num_rows + factors.num_columns) * factors.rank if factors.pays else shape.numel()


def refuse_powersgd(module: nn.Module, precision: str) -> None:
    """Raise ConfigError: a parameter is no matrix or vector with dense gradients; overflows would stay."""
    if precision == "16-mixed":
        raise ConfigError(
            "powersgd with Trainer(precision='16-mixed'): a step whose gradients overflow is skipped, but what the "
            "compression has left over would not be finite from then on. Use 'bf16-mixed', or no powersgd."
        )
    if sparse := list(sparse_weights(module).values()):
        raise ConfigError(
            f"powersgd: '{sparse[0]}' has sparse gradients, which are sent as they are. Set sparse=False for it, or no "
            "powersgd."
        )
    for name, parameter in module.named_parameters():
        if not parameter.dim() and parameter.requires_grad:
            raise ConfigError(
                f"powersgd: '{name}' is a single number, which torch's PowerSGD does not take. Give it the shape (1,), "
                "or no powersgd."
            )


class PowerSGD:
    """Compresses gradients in one run: a hook for DistributedDataParallel, and its state in checkpoints.

    torch keeps by bucket what the compression has left over (the error feedback, each rank's own) and the matrices that
    the next step starts from. Buckets change: after the first backward, on resuming, where layers unfreeze. So it is
    taken apart by parameter until buckets have settled, and where a checkpoint is saved.
    """

    def __init__(self, module: nn.Module, options: PowerSGDOptions) -> None:
        self.__name__ = self.__qualname__ = "powersgd"  # DDP asks hooks for their names
        self._options = options
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._seeds = {id(parameter): seed for seed, parameter in enumerate(module.parameters())}
        self._start()
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = sum(p.numel() for p in learning)
        after = sum(sent_numbers(p.shape, options.matrix_rank) for p in learning)
        rank_zero_info(
            f"ddp_tuned: from step {options.start_step} on, PowerSGD sends {after:,} in place of {before:,} numbers of "
            "gradients: training is not the same as under ddp."
        )

    def _start(self) -> None:
        self._state = PowerSGDState(
            None,
            matrix_approximation_rank=self._options.matrix_rank,
            start_powerSGD_iter=max(2, self._options.start_step),  # below 2 it is refused, before buckets are rebuilt
            min_compression_rate=MIN_COMPRESSION_RATE,
            orthogonalization_epsilon=1e-8,  # a gradient of zeros would become NaN
        )
        self._state.start_powerSGD_iter = self._options.start_step
        self._errors: dict[int, Tensor] = {}
        self._matrices: dict[int, Tensor] = {}
        self._buckets: dict[int, list[Tensor]] = {}
        self._num_backwards = 0
        self._begins = True

    def begin_wrapper(self) -> None:
        """Note that there is a new DistributedDataParallel, with other buckets."""
        self._split_buckets()
        self._num_backwards = 0
        self._begins = True

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Collective. Average a bucket."""
        if self._begins:  # the backward before is complete, so that nothing of it is in flight
            self._num_backwards += 1
            if self._num_backwards <= SETTLING_STEPS:
                self._split_buckets()
        self._begins = bucket.is_last()
        if self._state.iter >= self._state.start_powerSGD_iter:
            self._assemble_bucket(bucket)
        averaged = powerSGD_hook(self._state, bucket)
        if dist.get_backend() == "gloo":
            # Its second and third all-reduce start where the one before ends, in threads of gloo, which would order
            # those of two buckets differently on different ranks.
            averaged.wait()
        return averaged

    def _assemble_bucket(self, bucket: dist.GradBucket) -> None:
        """Give torch's state what belongs to the parameters of a bucket."""
        index, parameters = bucket.index(), bucket.parameters()
        known = self._buckets.get(index)
        if known is not None:
            if [id(p) for p in known] != [id(p) for p in parameters]:
                raise DistRecError(
                    "powersgd: DistributedDataParallel has changed its buckets in the middle of training. Report it."
                )
            return
        self._buckets[index] = parameters
        zeros = {id(p): torch.zeros(p.numel(), dtype=p.dtype, device=p.device) for p in parameters}
        self._state.error_dict[index] = torch.cat([self._errors.pop(id(p), zeros[id(p)]).to(p) for p in parameters])
        compressed = list(self._compressed(parameters))
        matrices = [self._matrices.pop(id(p), None) for p, _ in compressed]
        numbers = [
            self._drawn(p, f) if matrix is None else matrix.to(p)
            for (p, f), matrix in zip(compressed, matrices, strict=True)
        ]
        like = bucket.buffer()
        num_ps = sum(factors.num_rows * factors.rank for _, factors in compressed)
        self._state.p_memory_dict[index] = like.new_empty(num_ps)  # it is computed from the other matrix
        self._state.q_memory_dict[index] = torch.cat(numbers) if numbers else like.new_empty(0)

    def _split_buckets(self) -> None:
        """Keep torch's state by parameter."""
        for index, parameters in self._buckets.items():
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, error in zip(parameters, self._state.error_dict[index].split(sizes), strict=True):
                self._errors[id(parameter)] = error
            compressed = list(self._compressed(parameters))
            numbers = [factors.num_columns * factors.rank for _, factors in compressed]
            for (parameter, _), matrix in zip(compressed, self._state.q_memory_dict[index].split(numbers), strict=True):
                self._matrices[id(parameter)] = matrix
        for of_buckets in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            of_buckets.clear()
        self._buckets.clear()

    def _compressed(self, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Factors]]:
        """Yield the parameters whose gradients are compressed, in the order in which torch lays their matrices out."""
        by_shape: dict[Factors, list[Tensor]] = {}
        for parameter in parameters:
            factors = factors_of(parameter.shape, self._options.matrix_rank)
            if factors.pays:
                by_shape.setdefault(factors, []).append(parameter)
        for factors, alike in by_shape.items():
            for parameter in alike:
                yield parameter, factors

    def _drawn(self, parameter: Tensor, factors: Factors) -> Tensor:
        """Return what a parameter starts from: the same on every rank, and whichever bucket it is in."""
        draw = torch.Generator().manual_seed(self._seeds[id(parameter)])
        return torch.randn(factors.num_columns * factors.rank, generator=draw).to(parameter)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank, by the names of parameters."""
        self._split_buckets()  # the next backward assembles buckets again
        errors = {self._names[key]: error.detach().cpu().clone() for key, error in self._errors.items()}
        matrices = {self._names[key]: matrix.detach().cpu().clone() for key, matrix in self._matrices.items()}
        return {"steps": self._state.iter, "errors": errors, "matrices": matrices}

    def restore(self, of_rank: Mapping[str, Any] | None, of_rank_0: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint. of_rank: None with another number of ranks; of_rank_0: None: it has no state."""
        self._start()
        if of_rank_0 is None:
            return
        ids = {name: key for key, name in self._names.items()}
        self._state.iter = int(of_rank_0["steps"])
        matrices = (of_rank or of_rank_0)["matrices"]
        self._matrices = {ids[name]: matrix for name, matrix in matrices.items() if name in ids}
        if of_rank is None:
            rank_zero_warn(
                "powersgd: the checkpoint was written by another number of ranks, and what the compression had left "
                "over on each of them is dropped: it is missing from the gradients of the first steps."
            )
            return
        self._errors = {ids[name]: error for name, error in of_rank["errors"].items() if name in ids}
