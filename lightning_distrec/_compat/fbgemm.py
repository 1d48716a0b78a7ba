"""Private names of fbgemm: the kernels of torchrec's lookups, and their iteration counters."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def fbgemm_kernels(sharded: nn.Module) -> list[Any]:
    """Return the FBGEMM modules that hold the fused tables of a sharded collection on this rank.

    Source: ShardedEmbedding(Bag)Collection keeps its lookups in a plain list, `_lookups`, which modules() does not see.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    lookups: list[nn.Module] = sharded._lookups  # type: ignore[assignment]
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


@contextlib.contextmanager
def preserve_fbgemm_iterations(kernels: list[Any]) -> Iterator[None]:
    """Restore the kernels' iteration counters on leaving the context.

    Every forward increments them, evaluation included, and fused Adam computes its bias correction from them.
    Source: `iter` and `iter_cpu` in fbgemm_gpu/split_table_batched_embeddings_ops_training.py, _forward_impl.
    """
    before = [(kernel, kernel.iter.clone(), kernel.iter_cpu.clone()) for kernel in kernels]
    try:
        yield
    finally:
        for kernel, iteration, iteration_cpu in before:
            kernel.iter.copy_(iteration)
            kernel.iter_cpu.copy_(iteration_cpu)


def set_fbgemm_iterations(kernel: Any, num_steps: int) -> None:
    """Set a kernel's iteration counters, from which fused Adam computes its bias correction. Source: as above."""
    kernel.iter.fill_(num_steps)
    kernel.iter_cpu.fill_(num_steps)


class KernelCall:
    """Calls a kernel as torchrec's lookups do. ids: (num_ids,). offsets: (num_features * num_bags + 1,)."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the bags, (num_bags, sum of widths)."""
        rows: Tensor = self._kernel(indices=ids.long(), offsets=offsets.long())
        return rows
