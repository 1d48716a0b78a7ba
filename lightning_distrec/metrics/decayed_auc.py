"""AUC in which older examples count less."""

import re
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics.auc_formulas import bins_of, pairs_of_bins
from lightning_distrec.metrics.examples import flat_examples, sum_over_ranks


class DecayedAUC(Metric):
    """AUC of all examples, each weighted by 0.5 ** (updates since it came / half_life).

    `update(preds, labels)`: probabilities, or log-odds with from_logits; labels 0 or 1. Scores are counted in bins of
    equal width in log-odds, from -16 to 16, two float64 numbers each; `error_bound()` gives the largest difference that
    they cause. NaN without both labels. Over ranks it is that of one process whose batches are those of all ranks.

    Args:
        half_life: number of updates after which an example counts half.
        bins: number of bins. from_logits: whether predictions are log-odds.
    """

    full_state_update = True  # forward would add states otherwise, without decay
    higher_is_better = True
    is_differentiable = False

    def __init__(self, half_life: float = 100.0, bins: int = 2000, from_logits: bool = False, **options: Any) -> None:
        super().__init__(**{"dist_sync_fn": sum_over_ranks, **options})
        if half_life <= 0 or bins < 1:
            raise ConfigError(f"DecayedAUC: half_life={half_life} must be above 0, and bins={bins} at least 1.")
        self.half_life, self.bins, self.from_logits = half_life, bins, from_logits
        # A MetricCollection would share counts of different half lives, which are equal after the first batch.
        self._counts = re.sub(r"\W", "_", f"counts_of_{half_life}_{from_logits}")
        self.add_state(self._counts, torch.zeros(2 * bins, dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, preds: Tensor, labels: Tensor) -> None:
        preds, labels = flat_examples(self, preds, labels)
        places = 2 * bins_of(preds, self.bins, self.from_logits) + (labels > 0.5)
        # A NaN makes all counts NaN, and with them the result.
        weights = torch.where(preds.isnan(), torch.nan, 1.0).double()
        decayed = getattr(self, self._counts) * 0.5 ** (1 / self.half_life)
        setattr(self, self._counts, decayed.index_add(0, places, weights))

    @override
    def compute(self) -> Tensor:
        """Return the share of pairs in order, float32."""
        in_order, pairs, _ = pairs_of_bins(getattr(self, self._counts).view(-1, 2))
        return (in_order / pairs).float()

    def error_bound(self) -> Tensor:
        """Collective. Return the largest difference to the value of the scores themselves, which bins have caused."""
        with self.sync_context(should_sync=self.sync_on_compute):
            _, pairs, unsure = pairs_of_bins(getattr(self, self._counts).view(-1, 2))
            return (unsure / pairs).float()
