"""A copy of a module on the meta device: it takes no memory, and is configured and asked for its optimizers."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer


def meta_copy(module: LightningModule) -> LightningModule:
    """Return a copy of the module on the meta device, without its Trainer, after `configure_model`.

    Weights that are shared are shared in the copy too. Raises whatever the module's `__deepcopy__` and
    `configure_model` raise, which may need a Trainer.
    """
    memo = without_trainer(module)
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(module, memo)
    if is_overridden("configure_model", copied):
        with torch.device("meta"):
            copied.configure_model()
    return copied


def configured_optimizers(module: LightningModule) -> list[Optimizer]:
    """Return the optimizers that `configure_optimizers` makes. Raises what it raises: it may need a Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers are made and dropped without a step
        return list(dict.fromkeys(_optimizers_in(module.configure_optimizers())))


def without_trainer(module: LightningModule) -> dict[int, Any]:
    """Return a memo for copy.deepcopy in which the module's Trainer is already copied, as None."""
    try:
        return {id(module.trainer): None}
    except RuntimeError:  # not attached
        return {}


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in what configure_optimizers returns: one, a list, lists of both kinds, or dicts."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for entry in configured:
            yield from _optimizers_in(entry)
