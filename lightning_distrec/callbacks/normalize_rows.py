"""Keeps the rows of embedding tables at a norm, or below one, after every batch."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_distrec.errors import ConfigError


class NormalizeRows(Callback):
    """Scales rows after every training batch, exactly also where tables are sharded, by rows or by columns.

    Args:
        parameters: names of weights in the module, such as ["items.weight"], each (num_rows, dim).
        max_norm: scale rows whose 2-norm is above it to it; None: scale all rows to norm 1, as
            torch.nn.functional.normalize does.
    """

    def __init__(self, parameters: list[str], max_norm: float | None = None) -> None:
        if isinstance(parameters, str) or not parameters:
            raise ConfigError(f"NormalizeRows: parameters={parameters!r}: a list of names of weights is needed.")
        if max_norm is not None and max_norm <= 0:
            raise ConfigError(f"NormalizeRows: max_norm={max_norm} must be above 0.")
        self._names, self._max_norm = parameters, max_norm

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        known = dict(pl_module.named_parameters(remove_duplicate=False))
        for name in self._names:
            if name not in known:
                raise ConfigError(f"NormalizeRows: the module has no parameter '{name}'; it has {', '.join(known)}.")
            if refuse := getattr(trainer.strategy, "refuse_to_scale", None):
                refuse(name, self._max_norm)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scale_table = getattr(trainer.strategy, "scale_rows", None)
        for name in self._names:
            if scale_table is None or not scale_table(name, self._max_norm):
                scale_rows(pl_module.get_parameter(name).detach(), self._max_norm)


@torch.no_grad()
def scale_rows(weight: Tensor, max_norm: float | None) -> None:
    """Scale the rows of `weight`, (num_rows, dim), in place; see NormalizeRows."""
    norms = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    weight.mul_((max_norm / norms.clamp_min(1e-12)).clamp(max=1.0)) if max_norm else weight.div_(norms.clamp_min(1e-12))
