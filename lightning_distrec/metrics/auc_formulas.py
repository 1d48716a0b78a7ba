"""AUC as the share of pairs of a positive and a negative example that are in order; equal scores count half."""

import torch
from torch import Tensor
from torch.nn import functional

LOG_ODDS = 16.0
"""Bins divide log-odds from minus this to this evenly; what is beyond is in the outermost bins. exp(-16) is 1e-7."""


def pairs_by_group(groups: Tensor, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each group: its pairs in order, all of its pairs of a positive and a negative, and its examples.

    groups, scores, labels: (examples,); any integers, any numbers, 0 or 1.
    Returns (examples,) each, float64, filled from the front; 0 where there are no more groups. Pairs in order are NaN
    where a score is NaN.
    """
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    groups, scores, positive = groups[order], scores[order], labels[order].double()
    negative = 1 - positive
    group = _places(_changes(groups))
    run = _places(_changes(groups) | _changes(scores))  # equal scores of one group

    def sums(values: Tensor, places: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add_(0, places, values)

    of_run, negatives = sums(negative, run), sums(negative, group)
    before_run, before_group = of_run.cumsum(0) - of_run, negatives.cumsum(0) - negatives
    below = before_run[run] - before_group[group] + of_run[run] / 2
    in_order = sums(torch.where(scores.isnan(), torch.nan, positive * below), group)
    positives = sums(positive, group)
    return in_order, positives * negatives, positives + negatives


def pairs_of_bins(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs in order, all pairs, and half of the pairs that share a bin, which may be in order or not.

    counts: (..., bins, 2), negative and positive examples. Returns (...) each, float64.
    """
    negative, positive = counts.double().unbind(-1)
    unsure = (positive * negative).sum(-1) / 2
    below = (positive * (negative.cumsum(-1) - negative)).sum(-1)
    return below + unsure, negative.sum(-1) * positive.sum(-1), unsure


def bins_of(preds: Tensor, bins: int, from_logits: bool) -> Tensor:
    """Return the bin of each prediction, from 0; bins divide log-odds evenly. A NaN is in some bin."""
    log_odds = preds.double() if from_logits else torch.logit(preds.double(), eps=1e-9)
    places = ((log_odds + LOG_ODDS) * (bins / (2 * LOG_ODDS))).nan_to_num(0.0)
    return places.clamp(0, bins - 1).long()


def _changes(values: Tensor) -> Tensor:
    """Return where a value differs from the one before; True at the first."""
    return functional.pad(values[1:] != values[:-1], (1, 0), value=True)[: len(values)]


def _places(begins: Tensor) -> Tensor:
    return begins.cumsum(0) - 1
