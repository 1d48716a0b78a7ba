"""The dense part of a module with sharded tables, when it is fully sharded too: its optimizers, made before, follow."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.checkpoint.load import placed


def follow_parameters(
    optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]
) -> None:
    """Give optimizers the parameters that a module has now for those that it had before, with this rank's state.

    before, now: name -> parameter.
    """
    new = {id(parameter): now[name] for name, parameter in before.items() if now[name] is not parameter}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
        for old in [parameter for parameter in optimizer.state if id(parameter) in new]:
            state = optimizer.state.pop(old)
            optimizer.state[new[id(old)]] = {key: _cut(value, new[id(old)]) for key, value in state.items()}


def _cut(value: object, parameter: nn.Parameter) -> object:
    is_cut = isinstance(value, Tensor) and isinstance(parameter, DTensor)
    with torch.no_grad():
        return placed(value, parameter) if is_cut else value
