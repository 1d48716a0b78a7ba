"""Which submodules are blocks, each gathered and freed as one while the module is fully sharded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.activations.layers import INDIVISIBLE, can_be_called, named_layers, signature

Wrap = Literal["auto"] | Sequence[str]


def choose_blocks(module: nn.Module, wrap: Wrap, min_num_parameters: int) -> list[nn.Module]:
    """Return the blocks of a module, nested ones before those that contain them.

    wrap: "auto": submodules of at least min_num_parameters that either repeat (siblings of one class and shapes, as the
    layers of a transformer) or are single layers; or names of classes, and paths in the module.
    Raises ConfigError: there is no such class or path, or it shares a weight with the rest of the module.
    """
    holders = _holders(module)
    if wrap == "auto":
        return list(_auto_blocks(module, min_num_parameters, holders))
    blocks = named_layers(module, wrap, "wrap")
    for path, block in blocks.items():
        if not can_be_called(block):
            raise ConfigError(
                f"wrap: '{path}' is a {type(block).__name__}, which is never called itself. Name the class of its "
                "submodules."
            )
        if not _shares_no_parameters(block, holders):
            raise ConfigError(
                f"wrap: '{path}' shares a weight with another submodule, so that it cannot be gathered and freed "
                "alone. Leave it out, or name a submodule that contains both."
            )
    return [block for _, block in sorted(blocks.items(), key=lambda item: -item[0].count("."))]


def _auto_blocks(module: nn.Module, min_num_parameters: int, holders: dict[int, set[int]]) -> Iterator[nn.Module]:
    siblings = Counter(signature(child) for child in module.children())
    for child in dict.fromkeys(module.children()):
        if isinstance(child, FSDPModule) or sum(p.numel() for p in child.parameters()) < min_num_parameters:
            continue
        is_layer = isinstance(child, INDIVISIBLE) or not any(True for _ in child.children())
        is_block = is_layer or siblings[signature(child)] > 1
        if is_block and can_be_called(child) and _shares_no_parameters(child, holders):
            yield child
        elif not isinstance(child, INDIVISIBLE):
            yield from _auto_blocks(child, min_num_parameters, holders)


def _holders(module: nn.Module) -> dict[int, set[int]]:
    """Return parameter's id -> ids of the modules that hold it directly; several where it is shared."""
    holders: dict[int, set[int]] = {}
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(submodule))
    return holders


def _shares_no_parameters(module: nn.Module, holders: dict[int, set[int]]) -> bool:
    """Whether nothing outside of a module holds its parameters too."""
    inside = {id(submodule) for submodule in module.modules()}
    return all(holders[id(parameter)] <= inside for parameter in module.parameters())
