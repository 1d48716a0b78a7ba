"""What one step shows about the blocks of a module's containers: what is passed on from one to the next."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class BlockProfile:
    """Of each block of an nn.Sequential or nn.ModuleList, by its path."""

    input_bytes: dict[str, int] = field(default_factory=dict)
    """Of its first argument."""
    follows: set[str] = field(default_factory=set)
    """Those whose first argument is the very output of the block before."""


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return path -> block of all nn.Sequentials and nn.ModuleLists in a module."""
    return {
        f"{name}.{number}": block
        for name, container in module.named_modules()
        if name and isinstance(container, (nn.Sequential, nn.ModuleList))
        for number, block in enumerate(container)
    }


@contextmanager
def watch_blocks(module: nn.Module, found: BlockProfile) -> Iterator[None]:
    """Record what the blocks of a module get while they run inside."""
    outputs: dict[str, Any] = {}

    def watch(path: str, before: str, block: nn.Module, hooks: ExitStack) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                found.input_bytes[path] = args[0].numel() * args[0].itemsize
                if before in outputs and outputs[before] is args[0]:
                    found.follows.add(path)

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs[path] = output

        hooks.callback(block.register_forward_pre_hook(enter).remove)
        hooks.callback(block.register_forward_hook(leave).remove)

    with ExitStack() as hooks:
        for path, block in blocks_of(module).items():
            container, _, number = path.rpartition(".")
            watch(path, f"{container}.{int(number) - 1}", block, hooks)
        yield
