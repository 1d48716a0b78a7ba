"""Whether predictions are as large as labels on average."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_distrec.metrics.examples import flat_examples, sum_over_ranks


class Calibration(Metric):
    """Sum of predictions divided by the sum of labels: above 1, the model predicts too much.

    `update(preds, labels, weights=None)`: probabilities, or log-odds with from_logits. NaN where no label is positive
    (torchrec.metrics.calibration gives 0 there). Two float64 numbers of memory.
    """

    full_state_update = False
    higher_is_better = None
    is_differentiable = False
    predicted: Tensor
    observed: Tensor

    def __init__(self, from_logits: bool = False, **options: Any) -> None:
        super().__init__(**{"dist_sync_fn": sum_over_ranks, **options})
        self.from_logits = from_logits
        for name in ("predicted", "observed"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, preds: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        preds, labels, weights = (each.double() for each in flat_examples(self, preds, labels, weights))
        self.predicted = self.predicted + (weights * (preds.sigmoid() if self.from_logits else preds)).sum()
        self.observed = self.observed + (weights * labels).sum()

    @override
    def compute(self) -> Tensor:
        """Return the ratio, float32."""
        return torch.where(self.observed > 0, self.predicted / self.observed, torch.nan).float()
