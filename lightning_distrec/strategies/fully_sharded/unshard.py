"""Turns a fully sharded module back into an ordinary one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_distrec._compat.fully_shard import undo_fully_shard
from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec.strategies.fully_sharded.deep_copy import STEPS
from lightning_distrec.strategies.fully_sharded.fully_sharded_module import drop_unfinished_step
from lightning_distrec.strategies.fully_sharded.guards import GUARDS


def unshard_module(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Replace the shards of a LightningModule's parameters, and remove what fully_shard and we have added to it.

    full: the full parameters by name, on the host; others are without values, on the meta device.
    """
    drop_unfinished_step(module)
    new: dict[int, nn.Parameter] = {}  # a parameter that modules share stays shared
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if id(parameter) not in new:
                    value = full.get(f"{path}.{name}" if path else name)
                    if value is None:
                        value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    new[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                setattr(submodule, name, new[id(parameter)])
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
