"""Deep copies of modules that fully_shard was called with, which torch refuses: averages of weights live in copies.

A copy is sharded as the original is, and can run; between its forwards, each rank has its shard of it.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_distrec._compat.fully_shard import class_before_fully_shard, drop_state_dict_hooks, without_fully_shard
from lightning_distrec._compat.torch import apply_to_tensors

ShardCopy = Callable[[nn.Module, set[nn.Parameter]], None]
"""Shards a copy on the meta device as the original was. The set: its parameters that stay replicated."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def allow_deepcopy(module: nn.Module, shard_copy: ShardCopy, device: torch.device) -> None:
    """Give a fully sharded module a `copy.deepcopy` of its own. Copies live on `device`."""

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        return _copied(module, memo, shard_copy, device)

    # fully_shard's class has a __deepcopy__ that raises. An attribute of the instance takes its place, because
    # copy.deepcopy looks the method up on the object.
    module.__deepcopy__ = deepcopy  # type: ignore[assignment]


def gather_in_steps(module: nn.Module, steps: list[str]) -> None:
    """Let these methods of a fully sharded module gather the parameters outside of blocks, as its forward does."""
    for step in steps:
        users_step = inspect.unwrap(getattr(module, step))
        register_fsdp_forward_method(module, step)
        # Lightning reads a step's arguments through `__wrapped__`, one level deep, and torch's wrapper has another
        # wrapper below it where the user's step is decorated.
        getattr(module, step).__func__.__wrapped__ = users_step


def _copied(original: Any, memo: dict[int, Any], shard_copy: ShardCopy, device: torch.device) -> nn.Module:
    """Return a copy: of the class and attributes before fully_shard, sharded again, with the original's values."""
    original.reshard()
    # fully_shard has swapped the module's class for one that cannot be instantiated, so the copy begins as the user's
    # class. __new__ and __setstate__ go by copy.deepcopy's own protocol, without the user's __init__.
    users_class = class_before_fully_shard(original)
    copied: nn.Module = users_class.__new__(users_class)
    memo[id(original)] = copied
    kind: Any = type(original)
    reduced: Any = kind.__reduce_ex__(original, 4)  # the instance's own refuses, see guards.py
    state = without_fully_shard(reduced[2])
    steps = [name for name in STEPS if name in state]
    for name in ("__deepcopy__", *steps):  # they are bound to the original; the copy gets its own below
        state.pop(name, None)
    copied.__setstate__(copy.deepcopy(state, memo))
    shards = _replace_by_meta(copied)
    replicated = {p for p in copied.parameters() if not isinstance(p, DTensor) and not p.is_meta}
    shard_copy(copied, replicated)
    apply_to_tensors(copied, lambda tensor: _allocated(tensor, device))
    for name, shard in shards.items():
        parameter: Any = copied.get_parameter(name)
        with torch.no_grad():
            parameter.to_local().copy_(shard.to_local())
    gather_in_steps(copied, steps)
    allow_deepcopy(copied, shard_copy, device)
    return copied


def _replace_by_meta(module: nn.Module) -> dict[str, DTensor]:
    """Replace the sharded parameters outside of nested blocks by full ones without memory, which fully_shard takes.

    Returns name -> sharded parameter. Parameters that are shared stay shared.
    """
    shards: dict[str, DTensor] = {}
    full: dict[int, nn.Parameter] = {}
    for path, submodule in _outside_of_blocks(module, ""):
        drop_state_dict_hooks(submodule)
        for name, parameter in submodule.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                shards.setdefault(f"{path}{name}", parameter)
                if id(parameter) not in full:
                    memory = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    full[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
                setattr(submodule, name, full[id(parameter)])
    return shards


def _outside_of_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the prefix of parameters' names and the submodule, for all that are not inside of a nested block."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside_of_blocks(child, f"{prefix}{name}.")


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
