"""A hook between the two halves of an optimizer's step: computing gradients in a closure, and updating parameters."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def register_update_pre_hook(optimizer: Optimizer, action: Callable[[], None]) -> RemovableHandle:
    """Call `action` in every step before parameters are updated; returns a handle that removes it.

    torch's pre-hooks run before the step's closure, in which Lightning computes the loss, runs backward and clips,
    so that the action is appended to it. A closure that an optimizer calls several times runs the action as often.
    """

    def before_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            action()
            return None

        def closure_and_action() -> Any:
            result = closure()
            action()
            return result

        if len(args) > 1:
            return (args[0], closure_and_action, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_and_action}

    return optimizer.register_step_pre_hook(before_step)
