"""How many numbers an optimizer keeps as state of a parameter, by its class, before it has stepped."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

Count = Callable[[Mapping[str, Any], Tensor], int]

UNKNOWN_TENSORS = 2
"""Tensors of a parameter's size that an optimizer is taken to keep where its class is not known: Adam's."""


def _tensors(number: int, *flags: str) -> Count:
    """Count tensors of the parameter's size, and one more for each of the param group's flags that is set."""
    return lambda group, parameter: parameter.numel() * (number + sum(bool(group.get(flag)) for flag in flags))


def _adafactor(group: Mapping[str, Any], parameter: Tensor) -> int:
    if parameter.dim() < 2:
        return parameter.numel()
    return parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2]


def _one_per_row(group: Mapping[str, Any], parameter: Tensor) -> int:
    return parameter.numel() // parameter.shape[-1] if parameter.dim() else 1


_COUNTS: dict[type[Any], Count] = {
    optim.SGD: _tensors(0, "momentum"),
    optim.Adam: _tensors(2, "amsgrad"),
    optim.AdamW: _tensors(2, "amsgrad"),
    optim.Adamax: _tensors(2),
    optim.NAdam: _tensors(2),
    optim.RAdam: _tensors(2),
    optim.SparseAdam: _tensors(2),
    optim.Adagrad: _tensors(1),
    optim.Adadelta: _tensors(2),
    optim.RMSprop: _tensors(1, "momentum", "centered"),
    optim.Rprop: _tensors(2),
    optim.ASGD: _tensors(1),
    optim.Adafactor: _adafactor,
    RowWiseAdagrad: _one_per_row,
}
"""Class -> what it keeps for a parameter in this param group; a subclass counts as the class it inherits from."""


def state_numbers(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int | None:
    """Return how many numbers `optimizer` keeps for `parameter`, without its counter; None: its class is not known."""
    kind = next((kind for kind in type(optimizer).__mro__ if kind in _COUNTS), None)
    return None if kind is None else _COUNTS[kind](group, parameter)


def keeps_state_of_frozen(optimizer: optim.Optimizer) -> bool:
    """Whether it has a state for parameters that get no gradient: Adagrad makes it when it is constructed."""
    return isinstance(optimizer, (optim.Adagrad, RowWiseAdagrad))
