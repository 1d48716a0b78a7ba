"""Which submodules are blocks, each gathered and freed as one, and which parameters every rank keeps in full."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.filesize import decimal
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import UninitializedParameter

from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.strategies.activations.layers import INDIVISIBLE, can_be_called, named_layers, signature
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_weights

Wrap = Literal["auto"] | Sequence[str]
LARGE_BYTES = 2**20
"""Minimum size of replicated parameters that the log reports."""


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
        if not _shares_no_parameters(block, holders):
            raise ConfigError(f"wrap: '{path}' shares a weight with another submodule. Name one that contains both.")
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


def choose_replicated(module: nn.Module, blocks: Iterable[nn.Module], automatic: bool) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that fully_shard leaves out."""
    # These are scalars, which it refuses, and in manual optimization what is in no block: several backwards may run
    # in one step there, and the first would free it.
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if not parameter.dim() or (not automatic and id(parameter) not in in_blocks)
    }


def log_replicated(replicated: dict[str, nn.Parameter]) -> None:
    """Report large replicated parameters."""
    large = {name: p for name, p in replicated.items() if p.numel() * p.itemsize >= LARGE_BYTES}
    if large:
        size = decimal(sum(p.numel() * p.itemsize for p in large.values()))
        # In manual optimization backward would free them in the middle of a step.
        rank_zero_info(f"fsdp_tuned: {', '.join(large)} ({size}) are replicated: name their modules in wrap.")


def refuse_lazy(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"'{name}' has no shape before the first forward (a lazy module). Run one batch through the module "
                "before fit, in configure_model for example, or give the layer its size."
            )


def refuse_module(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet. Raise UnsupportedError: gradients are sparse."""
    refuse_lazy(module)
    if sparse := list(sparse_weights(module).values()):
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which FSDP2 does not reduce. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def refuse_mixed_dtypes(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise UnsupportedError: parameters that are gathered as one have several types."""
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [(name, p) for name, p in module.named_parameters() if id(p) not in in_blocks]
    groups = [(paths[id(block)], list(block.named_parameters())) for block in blocks]
    for path, parameters in [*groups, ("parameters outside of blocks", outside)]:
        names_by_dtype = {parameter.dtype: name for name, parameter in parameters if parameter.is_floating_point()}
        if len(names_by_dtype) > 1:
            named = ", ".join(f"'{name}' ({dtype})" for dtype, name in names_by_dtype.items()).replace("torch.", "")
            raise UnsupportedError(
                f"{path}: {named} are of several types, and FSDP2 gathers one type at a time. Name blocks with one "
                "type each, wrap=[...], or convert the parameters."
            )
