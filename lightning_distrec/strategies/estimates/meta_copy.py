"""A copy of a module that takes no memory, to be looked at, configured and asked for its optimizers."""

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
    """Return a copy of the module on the meta device, without its Trainer, `configure_model` called.

    Weights that are shared are shared there too. Raises whatever the module's parts raise where they cannot be copied,
    or configured without a Trainer.
    """
    known = without_trainer(module)
    for parameter in module.parameters():
        known[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    there = copy.deepcopy(module, known)
    if is_overridden("configure_model", there):
        with torch.device("meta"):
            there.configure_model()
    return there


def optimizers_of(there: LightningModule) -> list[Optimizer]:
    """Return what the copy's `configure_optimizers` makes. Raises what it raises: it may ask for a Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers are made only to be thrown away
        return list(dict.fromkeys(_optimizers(there.configure_optimizers())))


def without_trainer(module: LightningModule) -> dict[int, Any]:
    """Return what copy.deepcopy is to know beforehand, so that the copy has no Trainer."""
    try:
        return {id(module.trainer): None}
    except RuntimeError:  # not attached
        return {}


def _optimizers(made: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in what configure_optimizers returns: one, a list, lists of both kinds, or dicts."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, dict):
        yield from _optimizers(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for part in made:
            yield from _optimizers(part)
