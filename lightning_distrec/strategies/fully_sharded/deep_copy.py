"""Deep copies of what fully_shard was called with, which torch refuses: averages of weights are kept in copies.

A copy is cut as the original is, and can run; between its forwards, each rank has its part of it.
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

CutAgain = Callable[[nn.Module, set[nn.Parameter]], None]
"""Cuts a module on the meta device as the original was. The set: its parameters that stay whole."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def let_copy(module: nn.Module, cut_again: CutAgain, device: torch.device) -> None:
    """Give a fully sharded module a `copy.deepcopy` of its own. Copies live on `device`."""

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        return _copied(module, memo, cut_again, device)

    module.__deepcopy__ = deepcopy  # type: ignore[assignment]


def gather_for_steps(module: nn.Module, steps: list[str]) -> None:
    """Let a fully sharded module gather what is not in its blocks for these of its methods, as for forward."""
    for step in steps:
        written = inspect.unwrap(getattr(module, step))
        register_fsdp_forward_method(module, step)
        getattr(module, step).__func__.__wrapped__ = written  # where Lightning looks for the arguments, one level deep


def _copied(original: nn.Module, memo: dict[int, Any], cut_again: CutAgain, device: torch.device) -> nn.Module:
    assert isinstance(original, FSDPModule)
    original.reshard()
    kind = class_before_fully_shard(original)
    copied: nn.Module = kind.__new__(kind)
    memo[id(original)] = copied
    reduced: Any = original.__reduce_ex__(4)
    state = without_fully_shard(reduced[2])
    steps = [name for name in STEPS if name in state]
    for name in ("__deepcopy__", *steps):
        state.pop(name, None)
    copied.__setstate__(copy.deepcopy(state, memo))
    values = _put_on_meta(copied)
    whole = {p for p in copied.parameters() if not isinstance(p, DTensor) and not p.is_meta}
    cut_again(copied, whole)
    apply_to_tensors(copied, lambda tensor: _with_memory(tensor, device))
    for name, value in values.items():
        parameter = copied.get_parameter(name)
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.to_local().copy_(value.to_local())
    gather_for_steps(copied, steps)
    let_copy(copied, cut_again, device)
    return copied


def _put_on_meta(module: nn.Module) -> dict[str, DTensor]:
    """Replace the sharded parameters that no part of `module` has cut by whole ones without memory; return them."""
    values: dict[str, DTensor] = {}
    empty: dict[int, nn.Parameter] = {}
    for path, part in _uncut(module, ""):
        drop_state_dict_hooks(part)
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                values.setdefault(f"{path}{name}", parameter)
                if id(parameter) not in empty:
                    memory = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    empty[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
                setattr(part, name, empty[id(parameter)])
    return values


def _uncut(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a module that are not below one that is cut, with what their parameters' names begin with."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _uncut(child, f"{prefix}{name}.")


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
