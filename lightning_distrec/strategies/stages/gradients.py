"""Gradients that a schedule has computed, and how they become those of the loss that Lightning sees."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Delivered(torch.autograd.Function):
    """A loss whose backward has run already: its gradients are given to the parameters when Lightning asks for them.

    Lightning clears gradients, divides the loss (accumulate_grad_batches) and calls backward after training_step. As
    autograd's own, the gradients pass through all of that.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> Any:  # type: ignore[override]
        factor = of_loss.reshape(())
        return None, None, *(g if g is None else g * factor.to(g.device, g.dtype) for g in ctx.gradients)


class GradientsAside:
    """Takes the gradients that a schedule computes, and leaves those that were there before."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def loss_with_gradients(self, loss: Tensor) -> Tensor:
        """Return the loss, whose backward delivers the gradients that have been computed."""
        gradients = [parameter.grad for parameter in self._parameters]
        self.restore()
        anchor = torch.zeros((), device=loss.device, requires_grad=True)  # a stage may have nothing to learn
        return _Delivered.apply(loss, [None, *gradients], anchor, *self._parameters)

    def restore(self) -> None:
        """Put the gradients back that were there before."""
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient


class PartGradients:
    """Lets a loss that needs all micro-batches have its backward per micro-batch, as schedules run it."""

    def __init__(self) -> None:
        self.gradients: Sequence[Tensor] = ()
        """Of each micro-batch's output, once the loss is known."""

    def loss_of(self, output: Tensor, number: int) -> Tensor:
        """Return a number whose backward passes on the gradient of this micro-batch's output."""
        return _OfPart.apply(output, self, number)


class _OfPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, of_parts: PartGradients, number: int) -> Tensor:
        ctx.of_parts, ctx.number = of_parts, number
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> Any:  # type: ignore[override]
        return ctx.of_parts.gradients[ctx.number], None, None


def average_over_replicas(parameters: Sequence[nn.Parameter], group: Any, host_group: Any) -> None:
    """Collective among the replicas of a stage. Average their gradients.

    A parameter that any replica has used gets a gradient on all; replicas that have not used it count as 0.
    host_group: where they report what they have used, on the host.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    num_replicas = dist.get_world_size(group)
    if not trained or num_replicas == 1:
        return
    used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    dist.all_reduce(used, group=host_group)
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, times in zip(trained, used.tolist(), strict=True):
        if times:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_type.values():
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in alike])
        dist.all_reduce(flat.div_(num_replicas), group=group)
        for parameter, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
            parameter.grad = part.view_as(parameter)
