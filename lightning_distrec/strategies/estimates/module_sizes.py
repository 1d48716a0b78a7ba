"""What the layers of a module take on a rank beside its embedding tables."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from lightning_distrec.optimizers.translation import UNKNOWN_TENSORS, state_numbers
from lightning_distrec.sharding.tables import Table

TRUE_ITEMSIZE = {"16-true": 2, "bf16-true": 2, "64-true": 8}
"""Precision of a Trainer that changes types -> bytes of an element of any parameter."""


def dense_bytes(
    module: nn.Module,
    tables: Iterable[Table],
    optimizers: Iterable[Optimizer],
    precision: str,
    shares: int,
) -> int:
    """Return bytes of parameters, gradients, optimizer state and buffers that are not of `tables`.

    shares: number of ranks that share them, 1 where they are replicated. An unknown optimizer
    counts as Adam.
    """
    table_ids = {id(table.parameter) for table in tables}
    dense = {id(p): p for p in module.parameters() if id(p) not in table_ids}
    itemsize = {key: TRUE_ITEMSIZE.get(precision, p.itemsize) for key, p in dense.items()}
    total = sum(
        p.numel() * itemsize[key] * (2 if p.requires_grad else 1) for key, p in dense.items()
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in dense and parameter.requires_grad:
                    numbers = state_numbers(optimizer, group, parameter)
                    numbers = UNKNOWN_TENSORS * parameter.numel() if numbers is None else numbers
                    total += numbers * itemsize[id(parameter)]
    return total // shares + sum(buffer.numel() * buffer.itemsize for buffer in module.buffers())
