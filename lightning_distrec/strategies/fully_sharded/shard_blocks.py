"""A module whose parameters are cut over the ranks by torch's fully_shard (FSDP2), with rank 0's initial weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states, is_view
from lightning_distrec.checkpoint.load import placed
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.fully_sharded.deep_copy import let_copy

Reshard = Literal["auto"] | bool


def make_mesh(device_type: str, num_ranks: int, replicas: int, timeout: timedelta) -> DeviceMesh:
    """Collective. Return a mesh of all ranks: (data_parallel,), or (replicate, shard) where replicas is above 1.

    Ranks that follow each other share one replica of the parameters.
    """
    if replicas == 1:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("data_parallel",))
    ranks = torch.arange(num_ranks).view(replicas, -1)
    groups = [dist.new_subgroups_by_enumeration(numbers.tolist(), timeout=timeout)[0] for numbers in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, ranks.tolist(), mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Sharding:
    """How a module is cut, and how its parameters travel."""

    mesh: DeviceMesh
    device: torch.device
    reshard: Reshard
    """Whether a block's parameters are freed between forward and backward; "auto": but for the last block's."""
    compute_dtype: torch.dtype | None
    """Type in which parameters are gathered; gradients are added up as float32. None: as they are."""
    offload: bool
    """Whether parameters, gradients and optimizer state stay on the host."""

    def shard(self, module: nn.Module, blocks: Sequence[nn.Module], whole: set[nn.Parameter]) -> None:
        """Collective. Cut the parameters of each block, then of the rest, with rank 0's weights.

        blocks: those inside of others first; one at a time is on the device whole. whole: parameters that are not cut.
        Raises ConfigError: what is on the meta device cannot be initialized.
        """
        last = blocks[-1] if blocks else None
        for block in blocks:
            self._cut(block, whole, reshard=self.reshard if self.reshard != "auto" else block is not last)
        self._cut(module, whole, reshard=False)

    def _cut(self, module: nn.Module, whole: set[nn.Parameter], reshard: bool) -> None:
        _materialise(module, self.device)
        apply_to_tensors(module, partial(_moved, self.device))
        broadcast_module_states(module, [name for name, p in module.named_parameters() if isinstance(p, DTensor)])
        module.register_forward_hook(_outputs_of_their_own)  # before fully_shard's, which comes after it then
        self._apply(module, whole, reshard)
        module.register_forward_hook(_free_after_looking)
        module.register_load_state_dict_pre_hook(_load_parts)
        let_copy(module, lambda copy, whole_there: self._apply(copy, whole_there, reshard=True), self.device)

    def _apply(self, module: nn.Module, whole: set[nn.Parameter], reshard: bool) -> None:
        """Collective the first time: see fully_shard."""
        reduce_dtype = None if self.compute_dtype is None else torch.float32
        options: dict[str, Any] = {"ignored_params": whole} if whole else {}
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(self.compute_dtype, reduce_dtype, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy() if self.offload else OffloadPolicy(),
            **options,
        )


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, DTensor) else tensor.to(device)


def _outputs_of_their_own(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return a block's outputs with memory of their own where they are views.

    fully_shard hangs what gathers the block's weights for backward on its outputs, and an in-place operation on a view
    would drop that without a word. Can go when torch's _register_pre_backward_hook no longer warns of it.
    """
    if not torch.is_grad_enabled():
        return outputs
    return apply_to_collection(
        outputs, Tensor, lambda t: t.clone() if t.requires_grad and is_view(t) else t, allow_frozen=True
    )


def _free_after_looking(module: nn.Module, _: Any, __: Any) -> None:
    """Free what no backward will: weights may change before the next forward. A step frees its module at its end."""
    if not torch.is_grad_enabled() and not getattr(module, "in_step_of_strategy", False):
        assert isinstance(module, FSDPModule)
        module.reshard()


def _load_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let load_state_dict take whole tensors, and handles of a checkpoint's, of which this rank reads its part."""
    free_gathered(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = placed(state[key], parameters.get(key[len(prefix) :]))


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory and initial weights, those that its own `reset_parameters` draws."""
    for path, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"'{path or type(module).__name__}' ({type(part).__name__}) is on the meta device and has no "
                "reset_parameters() to draw its initial weights. Give it one, or build it on the host."
            )
        part.to_empty(device=device, recurse=False)
        reset()


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """Return the parts of a module that fully_shard was called with."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def free_gathered(module: nn.Module) -> None:
    """Free what a forward without a backward has left gathered, so that the module's parameters are those of ranks."""
    for part in sharded_parts(module):
        part.reshard()
