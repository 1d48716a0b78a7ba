"""What layers without tables keep on a rank, by the optimizers that there are: no code of the user's runs."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from lightning_distrec.optimizers.state_sizes import UNKNOWN_TENSORS, state_numbers
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.estimates.job import TRUE_ITEMSIZE


def dense_bytes(
    module: nn.Module, tables: Iterable[Table], optimizers: Iterable[Optimizer], precision: str, shares: int
) -> int:
    """Return bytes of parameters, gradients, optimizer state and buffers that are not of `tables`.

    shares: number of ranks that share them, 1 where they are replicated. An optimizer of an unknown class counts as
    Adam.
    """
    of_tables = {id(table.parameter) for table in tables}
    dense = {id(p): p for p in module.parameters() if id(p) not in of_tables}
    itemsize = {key: TRUE_ITEMSIZE.get(precision, p.itemsize) for key, p in dense.items()}
    total = sum(p.numel() * itemsize[key] * (2 if p.requires_grad else 1) for key, p in dense.items())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in dense and parameter.requires_grad:
                    numbers = state_numbers(optimizer, group, parameter)
                    numbers = UNKNOWN_TENSORS * parameter.numel() if numbers is None else numbers
                    total += numbers * itemsize[id(parameter)]
    return total // shares + sum(buffer.numel() * buffer.itemsize for buffer in module.buffers())
