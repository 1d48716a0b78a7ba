"""The dense layers of a module with sharded tables, when FSDP2 shards them too: their optimizers are made before."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.checkpoint.lazy_tensors import materialized_as


def replace_parameters(
    optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]
) -> None:
    """Let optimizers update the parameters that a module has now in place of those that it had before sharding.

    State that exists already, of a loaded checkpoint for example, is sharded as its parameter is.
    before, now: name -> parameter.
    """
    new = {id(parameter): now[name] for name, parameter in before.items() if now[name] is not parameter}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
        for old in [parameter for parameter in optimizer.state if id(parameter) in new]:
            state = optimizer.state.pop(old)
            optimizer.state[new[id(old)]] = {key: _sharded_as(value, new[id(old)]) for key, value in state.items()}


def _sharded_as(value: object, parameter: nn.Parameter) -> object:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    with torch.no_grad():
        return materialized_as(value, parameter)
