"""What may be done with a fully sharded module: no pickles, deep copies that are sharded too, and the way back.

torch refuses deep copies of modules that fully_shard was called with, and averages of weights live in copies. A copy is
sharded as the original is, and can run; between its forwards, each rank has its shard of it.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.jit import is_tracing

from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec._compat.torch import apply_to_tensors
from lightning_distrec._compat.torch_distributed import (
    class_before_fully_shard,
    drop_state_dict_hooks,
    undo_fully_shard,
    without_fully_shard,
)
from lightning_distrec.strategies.fully_sharded.shards import drop_unfinished_step, full_or_meta, swap_parameters
from lightning_distrec.unpicklable import refuse_module, refuse_pickling

GUARDS = ("__reduce_ex__", "__prepare_scriptable__")
ShardCopy = Callable[..., Any]
"""Shards a copy on the meta device as the original was. `ignored_params`: its parameters that stay replicated."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def guard(root: nn.Module) -> None:
    """Let pickle, torch.jit and torch.export raise ShardingError for the module, its blocks and its shards."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for parameter in root.parameters():
        if isinstance(parameter, DTensor):
            refuse_pickling(parameter, names[id(parameter)])
    for path, module in root.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(_guard_state)
        if isinstance(module, FSDPModule):
            name = path or class_before_fully_shard(root).__name__
            # Written into `__dict__`: pickle and torch.jit.script look them up on the object, and the class stays.
            vars(module)["__reduce_ex__"] = partial(refuse_module, "pickled", name)
            vars(module)["__prepare_scriptable__"] = partial(refuse_module, "scripted", name)
    root.register_forward_pre_hook(_refuse_export, prepend=True)  # before fully_shard's


def _guard_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        if isinstance(value := state.get(f"{prefix}{name}"), DTensor):
            refuse_pickling(value, f"{prefix}{name}")


def _refuse_export(module: nn.Module, _: Any) -> None:
    if is_exporting() or is_tracing():
        refuse_module("exported or traced", class_before_fully_shard(module).__name__)


def allow_deepcopy(module: nn.Module, shard_copy: ShardCopy, device: torch.device) -> None:
    """Give a fully sharded module a `copy.deepcopy` of its own. Copies live on `device`."""

    # fully_shard's class has a __deepcopy__ that raises. An attribute of the instance takes its place, because
    # copy.deepcopy looks the method up on the object.
    module.__deepcopy__ = lambda memo: _copied(module, memo, shard_copy, device)  # type: ignore[assignment]


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
    reduced: Any = kind.__reduce_ex__(original, 4)  # the instance's own refuses, see guard
    state = without_fully_shard(reduced[2])
    steps = [name for name in STEPS if name in state]
    for name in ("__deepcopy__", *steps):  # they are bound to the original; the copy gets its own below
        state.pop(name, None)
    # torch copies no DTensor whose gradient is one: gradients are put aside.
    gradients = {name: p.grad for name, p in _shards_outside_of_blocks(original).items() if p.grad is not None}
    for name in gradients:
        original.get_parameter(name).grad = None
    copied.__setstate__(copy.deepcopy(state, memo))
    for name, gradient in gradients.items():
        original.get_parameter(name).grad = gradient
    shards = _replace_by_meta(copied)
    replicated = {p for p in copied.parameters() if not isinstance(p, DTensor) and not p.is_meta}
    shard_copy(copied, ignored_params=replicated or None)
    apply_to_tensors(copied, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for name, shard in shards.items():
        parameter: Any = copied.get_parameter(name)
        with torch.no_grad():
            parameter.to_local().copy_(shard.to_local())
    for name, gradient in gradients.items():
        copied.get_parameter(name).grad = gradient.clone()
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


def _shards_outside_of_blocks(module: nn.Module) -> dict[str, DTensor]:
    named = [
        (f"{path}{name}", parameter)
        for path, submodule in _outside_of_blocks(module, "")
        for name, parameter in submodule.named_parameters(recurse=False)
    ]
    return {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}


def _outside_of_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the prefix of parameters' names and the submodule, for all that are not inside of a nested block."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside_of_blocks(child, f"{prefix}{name}.")


def unshard_module(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Replace the shards of a LightningModule's parameters, and remove what fully_shard and we have added to it.

    full: the full parameters by name, on the host; others are without values, on the meta device.
    """
    drop_unfinished_step(module)
    swap_parameters(module, lambda name, p: full_or_meta(full, name, p) if isinstance(p, DTensor) else None)
    users_steps = {name: step for name in STEPS if (step := _users_step(module, name)) is not None}
    is_sharded = isinstance(module, FSDPModule)
    for submodule in list(module.modules()) if is_sharded else []:
        added = ("__deepcopy__", *GUARDS) if isinstance(submodule, FSDPModule) else ()
        undo_fully_shard(submodule, str(__package__), (*added, *STEPS) if submodule is module else added)
    vars(module).update(users_steps)
    set_device_and_mesh(module, torch.device("cpu"), None)


def _users_step(module: nn.Module, name: str) -> Any:
    """Return a step that the user has set on the instance; None: the class's. `gather_in_steps` has wrapped it."""
    wrapper = vars(module).get(name)
    step = getattr(getattr(wrapper, "__func__", None), "__wrapped__", None)
    return None if getattr(step, "__self__", None) is module else step
