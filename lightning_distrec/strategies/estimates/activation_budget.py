"""What a rank's memory leaves for activations."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_distrec.strategies.run.strategy import DistRecStrategy

MAX_MEMORY_SHARE = 0.8
"""Share of a rank's memory that is used; the rest is for libraries, allocators, buckets and batches."""


def activation_budget(
    strategy: "DistRecStrategy[Any]", module: nn.Module, optimizers: Iterable[Optimizer], shares: int
) -> int:
    """Return the bytes that activations may take: what parameters, gradients and optimizer state leave.

    shares: number of ranks that share those, 1 where they are replicated.
    """
    # Here, because they import torchrec, which runs without tables do not need.
    from lightning_distrec.sharding.planning.topology import memory_bytes_per_rank
    from lightning_distrec.strategies.estimates.module_sizes import dense_bytes

    memory = memory_bytes_per_rank(strategy.root_device, strategy.num_local_ranks, None)
    precision = str(strategy.precision_plugin.precision)
    return max(0, int(MAX_MEMORY_SHARE * memory) - dense_bytes(module, (), optimizers, precision, shares))
