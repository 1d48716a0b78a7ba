"""Private names of fbgemm: torchrec's kernels, and their iteration counters."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def fbgemm_kernels(sharded: nn.Module) -> list[Any]:
    """Return the FBGEMM modules that hold a sharded collection's fused tables on this rank.

    Source: ShardedEmbedding(Bag)Collection keeps its lookups in a plain list, `_lookups`, outside of modules().
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    lookups: list[nn.Module] = sharded._lookups  # type: ignore[assignment]
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


@contextlib.contextmanager
def preserve_fbgemm_iterations(kernels: list[Any]) -> Iterator[None]:
    """Undo what forwards inside of the context add to the kernels' iteration counters.

    Every forward advances them, evaluation included, and fused Adam corrects its bias by them. Source: `iter` and
    `iter_cpu` in fbgemm_gpu/split_table_batched_embeddings_ops_training.py, _forward_impl.
    """
    before = [(kernel, kernel.iter.clone(), kernel.iter_cpu.clone()) for kernel in kernels]
    try:
        yield
    finally:
        for kernel, iteration, iteration_cpu in before:
            kernel.iter.copy_(iteration)
            kernel.iter_cpu.copy_(iteration_cpu)


def set_fbgemm_iterations(kernel: Any, num_steps: int) -> None:
    """Let a kernel go on counting its iterations, by which fused Adam corrects its bias, from here. Source: above."""
    kernel.iter.fill_(num_steps)
    kernel.iter_cpu.fill_(num_steps)
