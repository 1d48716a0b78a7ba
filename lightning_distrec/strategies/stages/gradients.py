"""Gradients that a schedule has computed, and how they become those of the loss that Lightning sees."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _ComputedLoss(torch.autograd.Function):
    """A loss whose backward has run already: its gradients are given to the parameters when Lightning asks for them.

    Lightning clears gradients, divides the loss (accumulate_grad_batches) and calls backward after training_step. As
    autograd's own, the gradients pass through all of that.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # type: ignore[override]
        # What Lightning does to the loss: it divides it by accumulate_grad_batches, for one.
        factor = loss_gradient.reshape(())
        return None, None, *(g if g is None else g * factor.to(g.device, g.dtype) for g in ctx.gradients)


class GradientsAside:
    """Takes the gradients that a schedule computes, and puts aside those of earlier batches, which accumulate."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._earlier_gradients = [parameter.grad for parameter in self._parameters]
        # The schedule's backwards add to what is there, and earlier gradients must not count twice.
        for parameter in self._parameters:
            parameter.grad = None

    def loss_with_gradients(self, loss: Tensor) -> Tensor:
        """Return the loss, whose backward delivers the gradients that have been computed."""
        gradients = [parameter.grad for parameter in self._parameters]
        self.restore()
        # A stage may have nothing to learn, and autograd calls no backward where no input asks for a gradient.
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return _ComputedLoss.apply(loss, [None, *gradients], anchor, *self._parameters)

    def restore(self) -> None:
        """Put the gradients of earlier batches back."""
        for parameter, gradient in zip(self._parameters, self._earlier_gradients, strict=True):
            parameter.grad = gradient


class ProxyLoss(torch.autograd.Function):
    """A loss whose backward passes on gradients[number], for a schedule that asks for one loss per micro-batch.

    The loss is that of the whole batch. Its backward down to the outputs runs before the schedule's first one.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor], number: int) -> Tensor:
        # The list is read in backward: in the first micro-batches' forwards it is still empty.
        ctx.gradients, ctx.number = gradients, number
        # Autograd needs a result that depends on the output; its value is never used.
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.gradients[ctx.number], None, None


def average_over_replicas(parameters: Sequence[nn.Parameter], group: Any, host_group: Any) -> None:
    """Collective among the replicas of a stage. Average their gradients.

    A parameter that any replica has used gets a gradient on all; replicas that have not used it count as 0.
    host_group: where they report what they have used, on the host.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    num_replicas = dist.get_world_size(group)
    if not trained or num_replicas == 1:
        return
    # Counted on the host, where the numbers are read: on a GPU that would be waited for.
    num_uses = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    dist.all_reduce(num_uses, group=host_group)
    parameters_by_dtype = defaultdict(list)
    for parameter, is_used in zip(trained, num_uses.tolist(), strict=True):
        if is_used:
            parameters_by_dtype[parameter.dtype].append(parameter)
    # One message for each type, of the same parameters in the same order on all replicas of the stage.
    for used in parameters_by_dtype.values():
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in used])
        dist.all_reduce(flat.div_(num_replicas), group=group)
        for parameter, part in zip(used, flat.split([p.numel() for p in used]), strict=True):
            parameter.grad = part.view_as(parameter)
