"""Log loss relative to that of a constant prediction."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from typing_extensions import override

from lightning_distrec.metrics.examples import flat_examples, sum_over_ranks

MIN_PROBABILITY = 1e-12
"""Predictions are kept this far from 0 and 1, as torchrec.metrics keeps them."""


class NormalizedEntropy(Metric):
    """Log loss divided by the entropy of the mean label: 1 for the best constant prediction, smaller is better.

    `update(preds, labels, weights=None)`: probabilities, or log-odds with from_logits; labels from 0 to 1.
    NaN where all labels are the same. Four float64 numbers of memory.
    Source: He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook; torchrec.metrics.ne.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    log_loss: Tensor
    positives: Tensor
    weights: Tensor

    def __init__(self, from_logits: bool = False, **options: Any) -> None:
        super().__init__(**{"dist_sync_fn": sum_over_ranks, **options})
        self.from_logits = from_logits
        for name in ("log_loss", "positives", "weights"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, preds: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        preds, labels, weights = (each.double() for each in flat_examples(self, preds, labels, weights))
        if self.from_logits:
            losses = functional.binary_cross_entropy_with_logits(preds, labels, weights, reduction="none")
        else:
            kept = preds.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
            losses = -weights * (labels * kept.log() + (1 - labels) * (1 - kept).log())
        self.log_loss = self.log_loss + losses.sum()
        self.positives = self.positives + (weights * labels).sum()
        self.weights = self.weights + weights.sum()

    @override
    def compute(self) -> Tensor:
        """Return the ratio, float32."""
        mean = self.positives / self.weights
        entropy = -(torch.special.xlogy(mean, mean) + torch.special.xlogy(1 - mean, 1 - mean))
        return torch.where(entropy > 0, self.log_loss / self.weights / entropy, torch.nan).float()
