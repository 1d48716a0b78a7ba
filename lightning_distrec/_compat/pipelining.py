"""What torch.distributed.pipelining, and modules that a user's step calls, do not offer publicly."""

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_calls(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of a module go to `call`, past its forward and its hooks; returns an undo.

    Source: torch/nn/modules/module.py, `_wrapped_call_impl`, by which nn.Module.compile does the same.
    """
    compiled = vars(module).get("_compiled_call_impl")
    module._compiled_call_impl = call

    def undo() -> None:
        if compiled is None:
            del module._compiled_call_impl
        else:
            module._compiled_call_impl = compiled

    return undo
