"""Private names of torch's dispatcher and of modules' calls: operations are watched, and calls replaced."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

Note = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


def watch_operations(note: Note) -> AbstractContextManager[Any]:
    """Call `note` after each operation that torch dispatches inside of the context, below autograd and autocast.

    note: gets the operation, its arguments, and what it returned; what it runs itself is not watched.
    What torch.compile has compiled runs without it: a mode that does not ignore compile's internals makes torch give
    up for good on any function that is first called inside of it.
    Source: torch/utils/_python_dispatch.py.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            note(func, args, kwargs or {}, output)
            return output

    return Watch()


def argument_names(operation: Any) -> list[str]:
    """Return the names of the arguments of an operation, in their order. Source: torch/_ops.py, OpOverload._schema."""
    return [argument.name for argument in operation._schema.arguments]


def written_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to in place. Source: torch/_ops.py, OpOverload._schema."""
    schema = operation._schema
    if not schema.is_mutable:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield given.get(argument.name)


def storage_key(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage while that lives. Source: torch/storage.py."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


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
