"""Private names of fbgemm: the kernels of torchrec's lookups, and their iteration counters."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec._compat.patches import Patches


def fbgemm_kernels(sharded: nn.Module) -> list[Any]:
    """Return the FBGEMM modules that hold the fused tables of a sharded collection on this rank."""
    # Source: ShardedEmbedding(Bag)Collection keeps its lookups in a plain list, `_lookups`, which
    # modules() does not see.
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    lookups: list[nn.Module] = sharded._lookups  # type: ignore[assignment]
    modules = [module for lookup in lookups for module in lookup.modules()]
    return [m for m in modules if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


@contextlib.contextmanager
def preserve_fbgemm_iterations(kernels: list[Any]) -> Iterator[None]:
    """Restore the kernels' iteration counters on leaving the context."""
    # Every forward increments them, evaluation included, and fused Adam computes its bias
    # correction from them.
    # Source: `iter` and `iter_cpu` in fbgemm_gpu/split_table_batched_embeddings_ops_training.py,
    # _forward_impl.
    counts = [(kernel, kernel.iter.clone(), kernel.iter_cpu.clone()) for kernel in kernels]
    try:
        yield
    finally:
        for kernel, iteration, iteration_cpu in counts:
            kernel.iter.copy_(iteration)
            kernel.iter_cpu.copy_(iteration_cpu)


def set_fbgemm_iterations(kernel: Any, num_steps: int) -> None:
    """Set a kernel's iteration counters, from which fused Adam computes its bias correction.
    Source: as above."""
    kernel.iter.fill_(num_steps)
    kernel.iter_cpu.fill_(num_steps)


class KernelCall:
    """Calls a kernel as torchrec's lookups do, without the kernel's Python where it decides
    nothing.

    A kernel's forward gathers 40 arguments for one operator. They stay the same from call to call
    but for ids and offsets, so that those of one call are kept, until the kernel gets other tensors
    or hooks. Bounds are not checked
    again: ids are in range when they are sent.
    Source: SplitTableBatchedEmbeddingBagsCodegen.forward and its lookup_*.invoke. Optimizers whose
    numbers depend on the count of iterations, and caches, go through that forward, which alone
    counts.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        name = _OPERATORS.get(kernel.optimizer.value)
        is_plain = not any(spec[2].name == "MANAGED_CACHING" for spec in kernel.embedding_specs)
        counts = (
            kernel._used_rowwise_adagrad_with_counter
            or kernel._used_rowwise_adagrad_with_global_weight_decay
        )
        self._name = name if is_plain and not counts else None
        self._bound_call: tuple[Any, list[Any], int, int] | None = None
        self._state: list[int] = []

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the bags, (num_bags, sum of widths). ids: (num_ids,). offsets: (num_features *
        num_bags + 1,)."""
        # As torchrec's lookups: an activation checkpoint that recomputes by these must save the
        # same types.
        kernel = self._kernel
        ids = ids.long()
        offsets = offsets.long()
        if self._name is None or kernel._forward_hooks or kernel._forward_pre_hooks:
            self._bound_call = None
            rows: Tensor = kernel(indices=ids, offsets=offsets)
            return rows
        hyperparameters = (kernel.learning_rate_tensor, kernel.optimizer_args)
        state = list(
            map(id, (*kernel._buffers.values(), *kernel._parameters.values(), *hyperparameters))
        )
        if self._bound_call is None or state != self._state:
            self._state = state
            return self._keep(ids, offsets)
        operator, arguments, at_ids, at_offsets = self._bound_call
        arguments[at_ids] = ids
        arguments[at_offsets] = offsets
        rows = operator(*arguments)
        # they would keep memory until the next call
        arguments[at_ids] = arguments[at_offsets] = None
        return rows

    def _keep(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Call the kernel, and keep what it gives its operator."""
        operators = torch.ops.fbgemm
        call_values = {}
        packet = getattr(operators, self._name or "")

        def watched(**options: Any) -> Any:
            call_values.update(options)
            return packet(**options)

        # The namespace caches operators as attributes, from which the kernel's module takes them at
        # each call.
        with Patches() as patches:
            patches.replace(operators, self._name or "", watched)
            rows: Tensor = self._kernel(indices=ids, offsets=offsets)
        schema = packet.default._schema.arguments
        names = [argument.name for argument in schema]
        arguments = [call_values.get(argument.name, argument.default_value) for argument in schema]
        self._bound_call = packet.default, arguments, names.index("indices"), names.index("offsets")
        return rows


_OPERATORS = {
    "exact_sgd": "split_embedding_codegen_lookup_sgd_function_pt2",
    "exact_adagrad": "split_embedding_codegen_lookup_adagrad_function_pt2",
    "exact_row_wise_adagrad": "split_embedding_codegen_lookup_rowwise_adagrad_function_pt2",
}
"""Optimizer -> the operator of its lookups."""
