"""Shards a module's parameters over the ranks, block by block, by torch's fully_shard (FSDP2)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states, is_view
from lightning_distrec.checkpoint.lazy_tensors import materialized_as
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.activations.layers import checkpointed_layers
from lightning_distrec.strategies.fully_sharded.blocks import (
    choose_blocks,
    choose_replicated,
    log_replicated,
    refuse_mixed_dtypes,
    refuse_module,
)
from lightning_distrec.strategies.fully_sharded.copies import STEPS, allow_deepcopy, gather_in_steps, guard
from lightning_distrec.strategies.fully_sharded.fsdp_options import Dtypes, FSDPOptions, choose_dtypes
from lightning_distrec.strategies.fully_sharded.shards import reshard

modules_in_step: "WeakSet[nn.Module]" = WeakSet()
"""Fully sharded modules of which the strategy runs a step now."""
_sharded_as: "WeakKeyDictionary[nn.Module, tuple[FSDPOptions, Dtypes]]" = WeakKeyDictionary()
"""Fully sharded module -> the options and types with which it was sharded."""


def shard_module(
    module: LightningModule,
    options: FSDPOptions,
    mesh: DeviceMesh,  # of all ranks
    device: torch.device,
    precision: str,
    consensus: Consensus,
) -> None:
    """Collective. Shard the module, with rank 0's weights, unless an earlier run has.

    Raises ConfigError, UnsupportedError on every rank: it cannot be sharded so, or was sharded otherwise.
    """
    settings = options, choose_dtypes(options, precision)
    if isinstance(module, FSDPModule):
        earlier = _sharded_as.get(module, settings)
        if earlier != settings:
            raise ConfigError(
                f"an earlier run has sharded this module as {earlier[0]}, computing in "
                f"{earlier[1].param or 'its own type'}; now it is {options}, in {settings[1].param or 'its own type'}. "
                "Give the same options and precision, or call trainer.strategy.unshard() of that run first."
            )
    else:
        blocks = consensus.all_or_none("setup", lambda: _choose_blocks(module, options))
        replicated = choose_replicated(module, blocks, module.automatic_optimization)
        log_replicated(replicated)
        _shard(module, blocks, set(replicated.values()), mesh, device, settings)
        gather_in_steps(module, [step for step in STEPS if is_overridden(step, module)])
        guard(module)
        _sharded_as[module] = settings
    set_device_and_mesh(module, device, mesh)


def _choose_blocks(module: nn.Module, options: FSDPOptions) -> list[nn.Module]:
    refuse_module(module)
    blocks = choose_blocks(module, options.wrap, options.min_num_parameters)
    refuse_mixed_dtypes(module, blocks)
    block_ids = {id(block) for block in blocks}
    paths = {path: submodule for path, submodule in module.named_modules() if id(submodule) in block_ids}
    checkpointed_layers(module, options.activation_checkpointing, paths)  # raises where it cannot be
    return blocks


def _shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    replicated: set[nn.Parameter],
    mesh: DeviceMesh,
    device: torch.device,
    settings: tuple[FSDPOptions, Dtypes],
) -> None:
    """Collective. Shard the parameters of each block, then the module's others, with rank 0's weights.

    blocks: nested ones first; one at a time is on the device unsharded. replicated: parameters to leave out.
    Raises ConfigError: what is on the meta device cannot be initialized.
    """
    reshards, dtypes = settings[0].reshard_after_forward, settings[1]
    inside = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
    for block in blocks:
        policy = dtypes.block_policy(is_nested=id(block) in inside)
        reshards_block = block is not blocks[-1] if reshards == "auto" else reshards
        _shard_one(block, partial(fully_shard, mesh=mesh, mp_policy=policy), replicated, reshards_block, device)
    _shard_one(module, partial(fully_shard, mesh=mesh, mp_policy=dtypes.root_policy()), replicated, False, device)


def _shard_one(
    module: nn.Module, shard: Callable[..., Any], replicated: set[nn.Parameter], reshards: bool, device: torch.device
) -> None:
    materialize(module, device)
    apply_to_tensors(module, lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device))
    broadcast_module_states(module, [name for name, p in module.named_parameters() if isinstance(p, DTensor)])
    module.register_forward_hook(_copy_views)  # hooks run in the order of registration: before fully_shard's
    shard(module, reshard_after_forward=reshards, ignored_params=replicated or None)
    module.register_forward_hook(_reshard_without_backward)
    module.register_load_state_dict_pre_hook(_load_shards)
    allow_deepcopy(module, partial(shard, reshard_after_forward=True), device)


def _copy_views(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return a block's outputs, views replaced by copies."""
    if not torch.is_grad_enabled():
        return outputs
    # fully_shard attaches the all-gather for backward to a block's outputs as an autograd hook, and an in-place
    # operation on a view drops such a hook. Can go when _register_pre_backward_hook no longer warns about it.
    return apply_to_collection(
        outputs, Tensor, lambda t: t.clone() if t.requires_grad and is_view(t) else t, allow_frozen=True
    )


def _reshard_without_backward(module: Any, _: Any, __: Any) -> None:
    """Free what no backward will free: weights may change before the next forward."""
    # A module in a step keeps its own parameters until the step ends, since the step may use them after its forward.
    if not torch.is_grad_enabled() and module not in modules_in_step:
        module.reshard()


def _load_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let load_state_dict take full tensors, and lazy ones of a checkpoint, of which this rank reads its shard."""
    reshard(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = materialized_as(state[key], parameters.get(key[len(prefix) :]))


def materialize(
    module: nn.Module,
    device: torch.device,
    is_missing: Callable[[str, Tensor], bool] = lambda _, tensor: tensor.is_meta,
) -> None:
    """Give what is on the meta device memory, and the initial weights that its own `reset_parameters` draws.

    is_missing: whether a tensor of a name has to get memory. Raises ConfigError: a module has no `reset_parameters`.
    """
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        tensors = [*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)]
        if not any(is_missing(f"{prefix}{name}", tensor) for name, tensor in tensors):
            continue
        reset = getattr(submodule, "reset_parameters", None) or getattr(submodule, "_reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"'{path or type(module).__name__}' ({type(submodule).__name__}) is on the meta device and has no "
                "reset_parameters() to draw its initial weights. Give it one, or build it on the host."
            )
        submodule.to_empty(device=device, recurse=False)
        reset()
