"""Private names of torch's FSDP2: what fully_shard puts on modules and parameters."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def unsharded_parameters(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the sharded parameters of what fully_shard cut, and what each is gathered into; those that were before.

    Source: torch/distributed/fsdp/_fully_shard; 2.11 has one group of parameters, later ones have several.
    """
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in group.fsdp_params if group is not None else []:
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.sharded_param, parameter


def drop_unreduced_gradient(parameter: Any) -> None:
    """Drop the gradient that a gathered parameter (see gathered_of) has added up without an exchange."""
    parameter.unsharded_accumulated_grad = None
    parameter._unsharded_param.grad = None


def unsharded_version(parameter: Any) -> int:
    """Return how often a gathered parameter (see gathered_of) was written to, but for being gathered."""
    return int(parameter._unsharded_param._version)


def unsharded_parameter(parameter: Any) -> Any:
    """Return what a gathered parameter (see gathered_of) is gathered into."""
    return parameter._unsharded_param


def reset_after_failure(module: Any) -> None:
    """Bring a fully sharded module into order that a failed step has left in its middle; torch 2.13 has a method.

    Source: torch/distributed/fsdp/_fully_shard, FSDPModule.reset_iter_state; which a module that never ran has not.
    """
    reset = getattr(module, "reset_iter_state", None)
    if reset is not None and module._get_fsdp_state()._is_root:
        reset()


def class_before_fully_shard(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before fully_shard. Source: torch/distributed/fsdp/_fully_shard."""
    kind: type[nn.Module] = type(module).__mro__[module._orig_cls_mro_index]  # type: ignore[index]
    return kind


def without_fully_shard(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without what fully_shard has put there: its state, and hooks around forward.

    Source: torch/distributed/_composable/contract.py, torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    kept = {key: value for key, value in state.items() if key not in (REGISTRY_KEY, STATE_KEY)}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        kept[name] = type(kept[name])((key, h) for key, h in kept[name].items() if not _is_of_fully_shard(h))
    return kept


def drop_state_dict_hooks(module: nn.Module) -> None:
    """Remove the hooks around state_dict and its loading that fully_shard has put on a part of what it cut.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if _is_of_fully_shard(getattr(hook, "hook", hook))]:
            del hooks[key]


def _is_of_fully_shard(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")
