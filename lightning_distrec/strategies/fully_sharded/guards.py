"""Refuses to pickle, script and export a fully sharded module, of which each rank has shards only."""

from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_exporting
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.jit import is_tracing

from lightning_distrec._compat.fully_shard import class_before_fully_shard
from lightning_distrec.unpicklable import refuse_module, refuse_pickling

GUARDS = ("__reduce_ex__", "__prepare_scriptable__")
"""Attributes of instances: pickle and torch.jit.script look them up on the object."""


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
            of = path or class_before_fully_shard(root).__name__
            vars(module)["__reduce_ex__"] = partial(_refuse_pickle, of)
            vars(module)["__prepare_scriptable__"] = partial(refuse_module, "scripted", of)
    root.register_forward_pre_hook(_refuse_export, prepend=True)  # before fully_shard's


def _refuse_pickle(path: str, _protocol: Any) -> None:
    refuse_module("pickled", path)


def _guard_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        if isinstance(value := state.get(f"{prefix}{name}"), DTensor):
            refuse_pickling(value, f"{prefix}{name}")


def _refuse_export(module: nn.Module, _: Any) -> None:
    if is_exporting() or is_tracing():
        refuse_module("exported or traced", class_before_fully_shard(module).__name__)
