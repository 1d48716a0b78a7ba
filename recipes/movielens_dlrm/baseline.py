"""The baseline: predicts likes from the average rates of users and items."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics.functional.classification import binary_auroc

# An average over n events is (sum + 10 * global mean) / (n + 10).
SMOOTHING_EVENTS = 10.0
# The sum of two averages can leave [0, 1]; and a log-loss must stay finite.
SMALLEST_PROBABILITY = 0.01


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good a list of probabilities is."""

    auroc: float
    """Chance that a like is ranked above a dislike: 0.5 is guessing, 1 is perfect."""
    log_loss: float
    """Mean of -log(probability given to what happened), in nats: lower is better."""


def mean_rates_score(
    train_users: Tensor,
    train_items: Tensor,
    train_labels: Tensor,
    users: Tensor,
    items: Tensor,
    labels: Tensor,
) -> Scores:
    """Score p = g + (u - g) + (i - g): g the share of likes in training, u and i those of the user
    and the item.

    Each (num_events,): ids int64, labels float 0 or 1. Users and items not seen in training count
    as average.
    """
    overall = train_labels.mean()
    user_above = _smoothed_rates(train_users, train_labels, int(users.max()) + 1)[users] - overall
    item_above = _smoothed_rates(train_items, train_labels, int(items.max()) + 1)[items] - overall
    return score(overall + user_above + item_above, labels)


def score(probabilities: Tensor, labels: Tensor) -> Scores:
    """Return AUROC and log-loss of `probabilities`, clipped to [0.01, 0.99], against 0/1 labels;
    both (num_events,)."""
    clipped = probabilities.clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    return Scores(
        auroc=binary_auroc(clipped, labels.long()).item(),
        log_loss=functional.binary_cross_entropy(clipped, labels).item(),
    )


def _smoothed_rates(ids: Tensor, labels: Tensor, at_least: int) -> Tensor:
    size = max(at_least, int(ids.max()) + 1)
    events = torch.bincount(ids, minlength=size)
    likes = torch.bincount(ids, weights=labels.double(), minlength=size)
    return (
        (likes + SMOOTHING_EVENTS * labels.double().mean()) / (events + SMOOTHING_EVENTS)
    ).float()
