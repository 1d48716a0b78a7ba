"""Shards a module's parameters over the ranks, block by block, by torch's fully_shard (FSDP2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states, is_view
from lightning_distrec.checkpoint.lazy_tensors import materialized_as
from lightning_distrec.strategies.fully_sharded.deep_copy import allow_deepcopy
from lightning_distrec.strategies.fully_sharded.dtypes import Dtypes
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.meta_weights import materialize

modules_in_step: "WeakSet[nn.Module]" = WeakSet()
"""Fully sharded modules of which the strategy runs a step now."""


@dataclass(frozen=True)
class Sharding:
    """How fully_shard is called."""

    mesh: DeviceMesh
    device: torch.device
    options: FSDPOptions
    dtypes: Dtypes

    def shard(self, module: nn.Module, blocks: Sequence[nn.Module], replicated: set[nn.Parameter]) -> None:
        """Collective. Shard the parameters of each block, then the module's others, with rank 0's weights.

        blocks: nested ones first; one at a time is on the device unsharded. replicated: parameters to leave out.
        Raises ConfigError: what is on the meta device cannot be initialized.
        """
        last = blocks[-1] if blocks else None
        inside = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
        for block in blocks:
            wanted = self.options.reshard_after_forward
            self.dtypes.convert_buffers(block)
            policy = self.dtypes.of_block(is_nested=id(block) in inside)
            self._shard_one(block, replicated, block is not last if wanted == "auto" else wanted, policy)
        self._shard_one(module, replicated, False, self.dtypes.of_root())
        _prefetch(module, blocks, self.options)

    def _shard_one(
        self,
        module: nn.Module,
        replicated: set[nn.Parameter],
        reshard_after_forward: bool,
        policy: MixedPrecisionPolicy,
    ) -> None:
        materialize(module, self.device)
        apply_to_tensors(module, partial(_to_device, self.device))
        broadcast_module_states(module, [name for name, p in module.named_parameters() if isinstance(p, DTensor)])
        module.register_forward_hook(_copy_views)  # hooks run in the order of registration: before fully_shard's
        self._fully_shard(module, replicated, reshard_after_forward, policy)
        module.register_forward_hook(_reshard_without_backward)
        module.register_load_state_dict_pre_hook(_load_shards)
        allow_deepcopy(
            module,
            lambda copied, its_replicated: self._fully_shard(copied, its_replicated, True, policy),
            self.device,
        )

    def _fully_shard(
        self,
        module: nn.Module,
        replicated: set[nn.Parameter],
        reshard_after_forward: bool,
        policy: MixedPrecisionPolicy,
    ) -> None:
        """Collective the first time: see fully_shard."""
        options: dict[str, Any] = {"ignored_params": replicated} if replicated else {}
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if self.options.cpu_offload else OffloadPolicy(),
            **options,
        )


def _prefetch(module: nn.Module, blocks: Sequence[nn.Module], options: FSDPOptions) -> None:
    """Let each block gather those that come next in the module while it computes."""
    own = {id(block) for block in blocks}
    in_order: list[Any] = [submodule for submodule in module.modules() if id(submodule) in own]
    for i, block in enumerate(in_order):
        if options.forward_prefetch:
            block.set_modules_to_forward_prefetch(in_order[i + 1 : i + 1 + options.forward_prefetch])
        if options.backward_prefetch:
            before = in_order[max(0, i - options.backward_prefetch) : i]
            block.set_modules_to_backward_prefetch(before[::-1])


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the module and submodules that fully_shard was called with."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def is_block(module: nn.Module) -> bool:
    """Return whether fully_shard was called with this module."""
    return isinstance(module, FSDPModule)


def reshard(module: nn.Module) -> None:
    """Free what a forward without a backward has left gathered, so that the module's parameters are the shards."""
    for fsdp_module in fsdp_modules(module):
        fsdp_module.reshard()


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, DTensor) else tensor.to(device)


def _copy_views(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return a block's outputs, views replaced by copies.

    fully_shard attaches the all-gather for backward to a block's outputs as an autograd hook, and an in-place operation
    on a view silently drops such a hook. Can go when torch's _register_pre_backward_hook no longer warns about it.
    """
    if not torch.is_grad_enabled():
        return outputs
    return apply_to_collection(
        outputs, Tensor, lambda t: t.clone() if t.requires_grad and is_view(t) else t, allow_frozen=True
    )


def _reshard_without_backward(module: Any, _: Any, __: Any) -> None:
    """Free what no backward will free: weights may change before the next forward.

    A module in a step keeps its own parameters until the step ends, since the step may use them after its forward.
    """
    if not torch.is_grad_enabled() and module not in modules_in_step:
        module.reshard()


def _load_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let load_state_dict take full tensors, and lazy ones of a checkpoint, of which this rank reads its shard."""
    reshard(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = materialized_as(state[key], parameters.get(key[len(prefix) :]))
