"""Private names of torch.distributed: fully_shard and pipelining."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor


def split_ranks(members: list[list[int]], timeout: timedelta) -> Any:
    """Collective. Return the new process group that has this rank. members: of each group; together
    all ranks."""
    if not getattr(dist.group.WORLD, "bound_device_id", None):
        return dist.new_subgroups_by_enumeration(members, timeout=timeout)[0]
    # As DeviceMesh: new_group has all ranks split NCCL's communicator for each of the groups, one
    # after the other.
    return dist.split_group(split_ranks=members, timeout=timeout)


def _param_groups(module: Any) -> Iterator[Any]:
    # Source: torch/distributed/fsdp/_fully_shard; torch 2.11 has one parameter group per module,
    # later ones several.
    state = module._get_fsdp_state()
    return filter(
        None,
        getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)],
    )


def sharded_and_unsharded_parameters(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (sharded parameter, FSDPParam) for the parameters of an FSDP module that were unsharded
    at least once."""
    for group in _param_groups(module):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.sharded_param, parameter


def assign_to(module: Any, places: Mapping[int, Iterable[Any]]) -> None:
    """Let an FSDP module assign its sharded and unsharded parameters to `places` too, as their
    attribute `parameter`.

    places: id of a sharded parameter -> its places.
    """
    # As to modules that share a parameter. Source:
    # torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _setattr_on_modules.
    for group in _param_groups(module):
        for parameter in group.fsdp_params:
            holders = parameter._module_info
            for place in places.get(id(parameter.sharded_param), ()):
                holders.shared_modules.append(place)
                holders.shared_param_names.append("parameter")


def reduces_gradients(module: Any) -> bool:
    """Return whether backward reduces the gradients of an FSDP module, and leaves none on its
    unsharded parameters."""
    return all(group.reduce_grads for group in _param_groups(module))


def drop_unreduced_gradient(fsdp_param: Any) -> None:
    """Drop the gradient that an FSDPParam (see sharded_and_unsharded_parameters) has accumulated
    without reduction."""
    fsdp_param.unsharded_accumulated_grad = None
    fsdp_param._unsharded_param.grad = None


def unsharded_parameter(fsdp_param: Any) -> Any:
    """Return the unsharded parameter of an FSDPParam, of which writes in place increment the
    version, not gathers."""
    return fsdp_param._unsharded_param


def reset_after_failure(module: Any) -> None:
    """Reset the FSDP state of a root module after a step that failed halfway."""
    # Source: torch/distributed/fsdp/_fully_shard, FSDPModule.reset_iter_state. A module that never
    # ran is not yet a root.
    root = module._get_fsdp_state()
    if not root._is_root:
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    # As it does, before torch 2.13.
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        group = state._fsdp_param_group
        if group is not None:
            group.wait_for_unshard()
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def make_fully_sharded_class(kind: Any) -> None:
    """Make the class that fully_shard is going to give to modules of this class.

    It has the name of the user's class, which errors show. And Python can swap it in for a class
    whose first base has no attributes, a Generic[T] for one: torch's own has FSDPModule for its
    first base, and so another layout.
    """
    # Source: torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _apply_to_module.
    if kind in _fully_shard.cls_to_fsdp_cls:
        return
    attributes = {
        "__deepcopy__": _fully_shard._unimplemented_deepcopy,
        "__module__": kind.__module__,
    }
    lowest = kind
    while lowest.__base__.__dictoffset__:
        lowest = lowest.__base__
    if lowest.__base__ is object:
        sharded = type(kind)(kind.__name__, (FSDPModule, kind), attributes)
    else:
        sharded = _fsdp_first(type(kind))(kind.__name__, (kind, FSDPModule), attributes)
    sharded.__qualname__ = kind.__qualname__
    _fully_shard.cls_to_fsdp_cls[kind] = sharded


def _fsdp_first(metaclass: Any) -> Any:
    """Return a metaclass of classes that look methods up in FSDPModule first, though it is not
    their first base."""

    class FSDPFirst(metaclass):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            first, *bases = super().mro()
            if FSDPModule in cls.__bases__:
                bases = [FSDPModule, *(kind for kind in bases if kind is not FSDPModule)]
            return [first, *bases]

    return FSDPFirst


def class_before_fully_shard(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before fully_shard replaced it. Source:
    torch/distributed/fsdp/_fully_shard."""
    kind: type[nn.Module] = type(module).__mro__[getattr(module, "_orig_cls_mro_index", 0)]
    return kind


def without_fully_shard(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without those that fully_shard added: its state, and hooks
    around forward."""
    # Source: torch/distributed/_composable/contract.py,
    # torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
    attributes = {
        key: value for key, value in state.items() if key not in (REGISTRY_KEY, STATE_KEY)
    }
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = attributes[name]
        attributes[name] = type(hooks)(
            (key, hook) for key, hook in hooks.items() if not _belongs_to_fully_shard(hook)
        )
    return attributes


def drop_state_dict_hooks(module: nn.Module) -> None:
    """Remove the hooks around state_dict and load_state_dict that fully_shard registered on a
    module."""
    # They all-gather and reshard parameters, and a deep copy without FSDP state cannot do that.
    # Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):
        for key in [
            key
            for key, hook in hooks.items()
            if _belongs_to_fully_shard(getattr(hook, "hook", hook))
        ]:
            del hooks[key]


def undo_fully_shard(module: Any, package: str, attributes: Iterable[str]) -> None:
    """Give a module the class back that it had before fully_shard, and remove fully_shard's state
    and hooks.

    package: hooks whose functions are defined in it go too, and so do these attributes of the
    instance. A module that fully_shard was not called with may have hooks of it, for its
    parameters.
    """
    # Source: torch/distributed/_composable_state.py, torch/distributed/fsdp/_fully_shard.
    drop_state_dict_hooks(module)
    state = without_fully_shard(vars(module))
    hooks_of_state = (
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_state_dict_hooks",
    )
    for name in ("_forward_pre_hooks", "_forward_hooks", *hooks_of_state):
        hooks = state[name]
        added = set()
        for k, h in hooks.items():
            if _module_of(h).startswith(package) or _belongs_to_fully_shard(h):
                added.add(k)
        state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in added)
    for name in (
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        hooks = state["_forward_pre_hooks" if "pre" in name else "_forward_hooks"]
        state[name] = type(state[name])(
            (key, value) for key, value in state[name].items() if key in hooks
        )
    users_class = class_before_fully_shard(module)
    # Past nn.Module.__setattr__, which would sort values into parameters and buffers. torch has
    # swapped the class for one with FSDPModule in front, and has no way back.
    vars(module).clear()
    dropped = {*attributes, "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
    vars(module).update({name: value for name, value in state.items() if name not in dropped})
    module.__class__ = users_class
    _module_state_mapping.pop(module, None)


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def _belongs_to_fully_shard(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def draw_dtensors_with(draw: Any) -> Callable[[], None]:
    """Let `draw(operator, args, options)` do random operators on DTensors; returns an undo."""
    # On CPUs every rank would draw the same values for its shard. Source:
    # torch/distributed/tensor/_dispatch.py.
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    original_handlers = dict(handlers)
    # The dispatcher reads this dict at each operation, which is the only setting there is; a copy
    # is put back.
    handlers.update({
        operator: draw for operator in dispatcher._random_ops if "dropout" not in str(operator)
    })

    def undo() -> None:
        handlers.clear()
        handlers.update(original_handlers)

    return undo


def output_strides(stage: Any) -> list[tuple[int, ...]]:
    """Return the strides of a stage's outputs, as the next stage has learned them for its
    buffers."""
    # Source: torch/distributed/pipelining/stage.py. Up to torch 2.12 they are tensors on the meta
    # device.
    learned = getattr(stage, "_stage_meta", None)
    if learned is not None:
        return [output.stride for output in learned.outputs]
    return [output.stride() for output in stage.get_outputs_meta()]


class IsolatedStage(PipelineStage):
    """A stage whose inference of shapes draws nothing from the user's generators, and keeps the
    strides it has seen."""

    # Source: torch/distributed/pipelining/stage.py. torch 2.11 draws, and receives into contiguous
    # buffers.
    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            outputs = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        stage: Any = self
        if not self.is_first and not hasattr(self, "_stage_meta"):
            for received in stage.args_recv_info.values():
                for info, like in zip(received, stage.inputs_meta, strict=True):
                    info.buffer = torch.empty_like(
                        like, device=self.device, requires_grad=info.buffer.requires_grad
                    )
        return outputs


def infers_shapes_with_loss() -> bool:
    """Return whether a schedule's first step calls the loss once more than its micro-batches: to
    infer shapes by it."""
    # Source: torch/distributed/pipelining/stage.py. torch 2.11 infers the shapes of outputs alone.
    return "loss_fn" in inspect.signature(PipelineStage._prepare_backward_infra).parameters
