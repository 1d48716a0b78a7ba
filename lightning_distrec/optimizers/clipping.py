"""One global norm over gradients that every rank has and gradients of shards that only one rank has."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def clip_by_norm(parameters: Iterable[nn.Parameter], sharded: set[int], max_norm: float) -> Tensor:
    """Collective. Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before.

    parameters: those to clip, the same ones on every rank but for shards; those without a gradient are passed over.
    sharded: ids of the parameters that only this rank has; the others are alike on all ranks and count once.
    The numbers are those of torch.nn.utils.clip_grad_norm_ on the unsharded parameters.
    """
    learning = _with_summed_rows(parameters)
    device = learning[0].device if learning else _device()
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for parameter in learning:
        squares[int(id(parameter) in sharded)] += torch.linalg.vector_norm(_values(parameter)).double() ** 2
    of_shards = squares[1].clone()
    dist.all_reduce(of_shards)
    norm = (squares[0] + of_shards).sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in learning:
        values = _values(parameter)
        values.mul_(factor.to(values.device, values.dtype))
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every element of every gradient to [-limit, limit]; rows that were not looked up stay 0."""
    for parameter in _with_summed_rows(parameters):
        _values(parameter).clamp_(-limit, limit)


def _with_summed_rows(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that have a gradient; gradients of several lookups of a row are summed first."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in learning:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    return learning


def _values(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.values() if gradient.is_sparse else gradient.detach()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
