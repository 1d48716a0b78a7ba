"""Weights that were built on the meta device get memory, and the values that their modules draw."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_distrec.errors import ConfigError


def _is_meta(name: str, tensor: Tensor) -> bool:
    return tensor.is_meta


def materialize(module: nn.Module, device: torch.device, is_missing: Callable[[str, Tensor], bool] = _is_meta) -> None:
    """Give what is on the meta device memory, and the initial weights that its own `reset_parameters` draws.

    is_missing: whether a tensor of a name has to get memory. Raises ConfigError: a module has no `reset_parameters`.
    """
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        own = [*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)]
        if not any(is_missing(f"{prefix}{name}", tensor) for name, tensor in own):
            continue
        reset = getattr(submodule, "reset_parameters", None) or getattr(submodule, "_reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"'{path or type(module).__name__}' ({type(submodule).__name__}) is on the meta device and has no "
                "reset_parameters() to draw its initial weights. Give it one, or build it on the host."
            )
        submodule.to_empty(device=device, recurse=False)
        reset()
