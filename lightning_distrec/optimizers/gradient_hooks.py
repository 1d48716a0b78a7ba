"""Hooks that run when a parameter's gradient is complete, among them optimizers that step inside of
backward.

torch's tutorial on fusing the optimizer step into the backward pass registers them by
register_post_accumulate_grad_hook; _apply_optimizer_in_backward hangs them on autograd's nodes.
Both run before gradients are averaged over ranks, or for every micro-batch: each rank would make
updates of its own.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_distrec._compat.patches import Patches
from lightning_distrec._compat.torch import (
    has_tensor_hooks,
    have_gradient_hooks,
    in_backward_optimizers,
    move_in_backward,
    take_gradient_hooks,
)
from lightning_distrec.errors import OptimizerError, UnsupportedError
from lightning_distrec.optimizers.step_hooks import refuse_inexact_optimizers
from lightning_distrec.ranks import Ranks

LOST = "_lost_gradient_hooks"
"""Attribute of a parameter that has taken the place of one with hooks."""


class GradientHooks(Patches):
    """Calls hooks on layers without tables after backward, with gradients of all ranks; `close`
    puts them back.

    Those of FSDP2's shards stay on them: FSDP2 calls them with the average.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[tuple[nn.Parameter, Mapping[int, Callable[[Any], Any]]]] = []
        self._is_in_backward = False

    def take(self, layers: Mapping[str, nn.Parameter], tensor_hooks: str, ranks: Ranks) -> bool:
        """Collective. Take the hooks off the parameters of layers; return whether any rank has
        some.

        tensor_hooks: how those of register_hook would differ from one process, "" where they do
        not.
        Raises UnsupportedError on every rank: a hook cannot be called as in one process.
        """
        self.close()  # a learning rate finder has begun training before
        self._hooks = []
        ranks.all_or_none("on_train_start", partial(_refuse, layers, tensor_hooks))
        hooked = []
        for p in layers.values():
            if have_gradient_hooks([p]) or in_backward_optimizers(p):
                hooked.append(p)
        for parameter in reversed(hooked):  # as backward goes
            if not isinstance(parameter, DTensor):
                hooks, put_back = take_gradient_hooks(parameter)
                self.callback(put_back)
                self._hooks.append((parameter, hooks))
            elif in_backward_optimizers(parameter):
                self.callback(
                    parameter.register_post_accumulate_grad_hook(_step_in_backward).remove
                )
        if any(isinstance(parameter, DTensor) for parameter in hooked):
            # Which optimizers the hooks step is seen when they do.
            handle = register_optimizer_step_pre_hook(
                lambda optimizer, *_: refuse_inexact_optimizers([optimizer])
            )
            self.callback(handle.remove)
        return any(ranks.all_gather(bool(hooked)))

    def call_after(self, target: Any, is_only_backward: bool) -> None:
        """Call them after each `target.backward`. is_only_backward: whether any other one raises
        OptimizerError."""
        if not self._hooks:
            return
        backward = target.backward

        def backward_and_hooks(*args: Any, **options: Any) -> Any:
            self._is_in_backward = True
            try:
                result = backward(*args, **options)
            finally:
                self._is_in_backward = False
            self._call()
            return result

        self.replace(target, "backward", backward_and_hooks)
        for parameter, _ in self._hooks if is_only_backward else ():
            self.callback(
                parameter.register_post_accumulate_grad_hook(self._refuse_other_backward).remove
            )

    @torch.no_grad()
    def _call(self) -> None:
        for parameter, hooks in self._hooks:
            if parameter.grad is not None:
                for hook in list(hooks.values()):
                    hook(parameter)
                _step_in_backward(parameter)

    def _refuse_other_backward(self, _: Any) -> None:
        if not self._is_in_backward:
            raise OptimizerError(
                "loss.backward() was called, and hooks on gradients or optimizers in backward wait "
                "for the average over the ranks, which it does not make. Call "
                "self.manual_backward(loss)."
            )


def _step_in_backward(parameter: nn.Parameter) -> None:
    """Do what the hook of `_apply_optimizer_in_backward` does, where the parameter has one."""
    optimizers = in_backward_optimizers(parameter)
    for optimizer in optimizers:
        optimizer.step()
    if optimizers:
        parameter.grad = None


def note_replaced(old: nn.Parameter, new: nn.Parameter) -> None:
    """Remember that a parameter takes the place of one with hooks, so that a fit refuses it."""
    if new is not old and (
        have_gradient_hooks([old]) or in_backward_optimizers(old) or hasattr(old, LOST)
    ):
        setattr(new, LOST, True)


def move_in_backward_optimizers(
    old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]
) -> list[Optimizer]:
    """The same for all by name, but optimizers in backward go over. Return them: they hold the old
    parameters still."""
    moved = []
    for name, parameter in old.items():
        if new[name] is not parameter:
            moved += in_backward_optimizers(parameter)
            move_in_backward(parameter, new[name])
        note_replaced(parameter, new[name])
    return moved


def _refuse(layers: Mapping[str, nn.Parameter], tensor_hooks: str) -> None:
    for name, parameter in layers.items():
        obstacle = ""
        if hasattr(parameter, LOST):
            obstacle = "it was registered before sharding, or unshard(), replaced the parameter"
        elif has_tensor_hooks(parameter):
            is_shard = isinstance(parameter, DTensor)
            obstacle = (
                "FSDP2 does not call hooks of register_hook on shards" if is_shard else tensor_hooks
            )
        if obstacle:
            raise UnsupportedError(
                f"'{name}' has a hook on its gradient that would be lost or run at other times: "
                f"{obstacle}. Return an optimizer from configure_optimizers in place of hooks that "
                "step one. Register other hooks by register_post_accumulate_grad_hook, in "
                "on_train_start. For wandb's watch, set log='parameters'."
            )
