"""Clips by one global norm over replicated gradients and gradients that are sharded over the
ranks."""

from collections.abc import Iterable, Set
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_distrec._compat.torch import norms_of, scale_all

ON_ALL = "on all ranks"
ON_ONE = "on one rank"


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    sharded: Set[int] | None,
    max_norm: float,
    num_replicas: int = 1,
) -> Tensor:
    """Collective. Scale all gradients so that their global 2-norm is at most `max_norm`; returns
    the norm before.

    parameters: those to clip, the same ones on every rank but for shards; those without a gradient
    are passed over.
    sharded: ids of the parameters that only this rank has; None: no rank has such. The others are
    replicated and count once; of DTensors each rank counts its local tensor. num_replicas: how many
    ranks have each of `sharded`; where replicas differ, squares count by their mean, so that all
    ranks clip by one norm. The numbers are those of torch.nn.utils.clip_grad_norm_ on the unsharded
    parameters.
    """
    parameters = list(parameters)
    # An all-reduce for each placement, in this order on every rank: a missing one would leave the
    # others waiting.
    placements = _placements(parameters, sharded)
    gradients: dict[Any, list[Tensor]] = {placement: [] for placement in placements}
    for parameter in _learning(parameters):
        gradients[_placement(parameter, sharded)].append(_values(parameter))
    # NCCL reduces tensors on a GPU only, and a rank may have no gradient that shows a device.
    is_nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    squares = []
    for placement, values in gradients.items():
        square = _sum_of_squares(values, device)
        for group in _groups(placement):
            dist.all_reduce(square, group=group)
        if placement == ON_ONE:
            square /= num_replicas
        squares.append(square)
    # On the device to the end: reading the norm on the host would wait for the GPU in every step.
    norm = torch.stack(squares).sum().sqrt().float()
    # As torch.nn.utils.clip_grad_norm_ does it: the same 1e-6, and a factor of 1 in place of a
    # branch.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for values in _group_gradients(chain.from_iterable(gradients.values())):
        scale_all(values, factor.to(values[0].device, values[0].dtype))
    return norm


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, in float64 as far as it is taken over
    gradients."""
    # float64: shards are added up in another order than full tables, and the norm must be that of
    # torch.
    parts = []
    for values in _group_gradients(gradients):
        parts.append(torch.stack(norms_of(values)).to(device, torch.float64))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(parts).square().sum()


def _group_gradients(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return groups of the gradients that have elements: one kernel serves all of a group."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every element of every gradient to [-limit, limit]; rows that were not looked up stay
    0."""
    for parameter in _learning(parameters):
        _values(parameter).clamp_(-limit, limit)


def _placements(parameters: list[nn.Parameter], sharded: Set[int] | None) -> list[Any]:
    """Return the ways in which parameters are placed on the ranks, in the same order on every
    rank."""
    meshes = dict.fromkeys(_placement(p, None) for p in parameters if isinstance(p, DTensor))
    # All ranks reduce all of them, also those of which a rank has no gradient, or has no shard.
    return [ON_ALL, *([] if sharded is None else [ON_ONE]), *meshes]


def _placement(parameter: nn.Parameter, sharded: Set[int] | None) -> Any:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    return ON_ONE if sharded is not None and id(parameter) in sharded else ON_ALL


def _groups(placement: Any) -> list[Any]:
    """Return the process groups over which the squares of parameters that are placed so must be
    summed."""
    if placement in (ON_ALL, ON_ONE):
        return [dist.group.WORLD] if placement == ON_ONE else []
    mesh, kinds = placement
    return [mesh.get_group(dim) for dim, kind in enumerate(kinds) if isinstance(kind, Shard)]


def _learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that have a gradient; gradients of several lookups of a row are summed
    first."""
    learning = []
    for parameter in parameters:
        if parameter.grad is not None:
            learning.append(parameter)
            # Squares of a row's gradients are not the square of their sum.
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
    return learning


def _values(parameter: nn.Parameter) -> Tensor:
    """Return the values of this rank's gradient, as a view."""
    gradient = parameter.grad
    assert gradient is not None
    # Detached: the factor is written in place, which autograd refuses for a gradient that has a
    # graph (create_graph).
    if isinstance(gradient, DTensor):
        return gradient.to_local().detach()
    return gradient.values() if gradient.is_sparse else gradient.detach()
