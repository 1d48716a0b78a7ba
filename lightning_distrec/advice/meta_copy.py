"""A copy of a module on the meta device, and the optimizers that it configures there."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_distrec._compat.torch import copy_in_backward


def meta_copy(module: LightningModule) -> LightningModule:
    """Return a copy of the module on the meta device, without its Trainer, after `configure_model`.

    Raises whatever the module's `__deepcopy__` and `configure_model` raise, which may need a
    Trainer.
    """
    memo: dict[int, Any] = {}
    with suppress(RuntimeError):  # the module is attached to no Trainer
        # deepcopy returns what the memo has for an object: None for the Trainer, which has loops
        # and loaders.
        memo[id(module.trainer)] = None
    for parameter in module.parameters():
        # deepcopy takes these for copies, and so allocates nothing; shared weights stay shared.
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        copy_in_backward(parameter, memo[id(parameter)])
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(module, memo)
    if is_overridden("configure_model", copied):
        with torch.device("meta"):
            copied.configure_model()
    return copied


def configured_optimizers(module: LightningModule) -> list[Optimizer]:
    """Return the optimizers that `configure_optimizers` makes. Raises what it raises: it may need a
    Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers are made and dropped without a step
        # Once each: with several schedulers an optimizer may be listed more than once.
        return list(dict.fromkeys(_optimizers_in(module.configure_optimizers())))


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in what configure_optimizers returns: one, a list, lists of both kinds,
    or dicts."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for entry in configured:
            yield from _optimizers_in(entry)
