"""AUC of the latest examples."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics.auc_formulas import pairs_by_group
from lightning_distrec.metrics.examples import flat_examples

EMPTY = -1


class WindowedAUC(Metric):
    """AUC of the latest `window` examples of each rank, all of them together; exact, equal scores count half.

    `update(preds, labels)`: any scores, and labels 0 or 1. NaN without both labels. 5 bytes for each example of the
    window; `compute` gathers those of all ranks on each rank.
    """

    full_state_update = True  # Lightning's and torchmetrics' forward would join windows otherwise
    higher_is_better = True
    is_differentiable = False
    preds: Tensor
    labels: Tensor
    seen: Tensor

    def __init__(self, window: int = 100_000, **options: Any) -> None:
        super().__init__(**options)
        if window < 1:
            raise ConfigError(f"WindowedAUC: window={window} must be at least 1.")
        self.window = window
        self.add_state("preds", torch.zeros(window), dist_reduce_fx="cat")
        self.add_state("labels", torch.full((window,), EMPTY, dtype=torch.int8), dist_reduce_fx="cat")
        # Not a number of the host: torchmetrics puts states back after a batch's own value.
        self.add_state("seen", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, preds: Tensor, labels: Tensor) -> None:
        preds, labels = (each[-self.window :] for each in flat_examples(self, preds, labels))
        places = (self.seen + torch.arange(len(preds), device=preds.device)) % self.window
        self.preds = self.preds.index_copy(0, places, preds.to(self.preds.dtype))
        self.labels = self.labels.index_copy(0, places, (labels > 0.5).to(torch.int8))
        self.seen = self.seen + len(preds)

    @override
    def compute(self) -> Tensor:
        """Return the share of pairs in order, float32."""
        preds, labels = self.preds.flatten(), self.labels.flatten()  # a row for each rank, where they are joined
        there = labels != EMPTY
        # What is empty is a group of its own.
        in_order, pairs, _ = pairs_by_group((~there).long(), preds, labels.clamp_min(0))
        return torch.where(there.any(), in_order[0] / pairs[0], torch.nan).float()
