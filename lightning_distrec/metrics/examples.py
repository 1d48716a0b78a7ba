"""What the metrics of predictions and labels have in common."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec.errors import ConfigError


def flat_examples(metric: object, preds: Tensor, labels: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Return predictions, labels and what else there is of each example, (examples,) each; None gives ones.

    Raises ConfigError: shapes differ, or predictions are no floating point numbers.
    """
    given = [preds, labels, *(torch.ones_like(preds) if other is None else other for other in others)]
    if any(tensor.shape != preds.shape for tensor in given) or not preds.is_floating_point():
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
        raise ConfigError(
            f"{type(metric).__name__}: predictions of {preds.dtype}, labels and the rest have shapes {shapes}. They "
            "need the same shape, and predictions are floating point numbers."
        )
    return [tensor.detach().reshape(-1) for tensor in given]


def sum_over_ranks(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Collective. Return the sum of a state, for torchmetrics' dist_sync_fn: it would gather every rank's copy."""
    total = state.detach().clone()
    dist.all_reduce(total, group=group)
    return [total]
