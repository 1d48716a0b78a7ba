"""Losses of queries against the keys of all ranks' batches."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec.errors import ConfigError
from lightning_distrec.retrieval.full_softmax import Reduction, problem_of_reduction, reduced
from lightning_distrec.retrieval.rank_group import (
    RankGroup,
    gathered_rows,
    ranks_of,
    with_gradient,
)


def in_batch_loss(
    queries: Tensor,
    keys: Tensor,
    ids: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    log_q: Tensor | None = None,
    negatives: Tensor | None = None,
    gather: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """Collective with `gather`, and so is its backward. Return the cross entropy of each query's
    own key among the keys of all ranks.

    queries, keys: (queries, dim); the key of a query is in its row. ids: (queries,), the items of
    the keys; the same item in another row is no negative.
    log_q: (queries,), logarithms of how often each key's item is in a batch, which are subtracted
    from scores: see SampledFrequency.
    negatives: (queries, any number, dim), further negatives of each query alone.
    gather: False: keys of this rank alone. reduction: as of `softmax_loss`.
    Raises ConfigError on every rank: arguments do not fit.
    """
    batch = _scored(
        "in_batch_loss", queries, keys, ids, temperature, log_q, negatives, gather, reduction
    )
    is_other = batch.is_same.scatter(1, batch.own_columns[:, None], False)
    num_keys = is_other.shape[1]
    batch.scores[:, :num_keys].masked_fill_(is_other, -torch.inf)
    losses = functional.cross_entropy(batch.scores, batch.own_columns, reduction="none")
    return reduced(losses, reduction, batch.counts, batch.own_columns >= 0)


def contrastive_loss(
    queries: Tensor,
    keys: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 0.1,
    negatives: Tensor | None = None,
    gather: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """Collective with `gather`, and so is its backward. Return the supervised contrastive loss: all
    keys with a query's label are its positives.

    queries, keys: (queries, dim), two views of the same examples. labels: (queries,).
    negatives and the others: as of `in_batch_loss`.
    Source: Khosla et al., Supervised Contrastive Learning, 2020, equation 2.
    """
    batch = _scored(
        "contrastive_loss", queries, keys, labels, temperature, None, negatives, gather, reduction
    )
    num_keys = batch.is_same.shape[1]
    positives = torch.where(batch.is_same, batch.scores[:, :num_keys], 0)
    means = positives.sum(1) / batch.is_same.sum(1)
    losses = batch.scores.logsumexp(1) - means
    return reduced(losses, reduction, batch.counts, batch.own_columns >= 0)


@dataclass(frozen=True)
class _Scored:
    scores: Tensor
    """(queries, keys of all ranks and own negatives), float32 or float64."""
    own_columns: Tensor
    """(queries,), the column of each query's key."""
    is_same: Tensor
    """(queries, keys of all ranks): whether the key is of the same item."""
    counts: list[int]
    """How many queries each rank has."""


def _scored(
    call: str,
    queries: Tensor,
    keys: Tensor,
    ids: Tensor | None,
    temperature: float | Tensor,
    log_q: Tensor | None,
    negatives: Tensor | None,
    gather: bool,
    reduction: Reduction,
) -> _Scored:
    ranks = ranks_of(None) if gather else RankGroup()
    fits = queries.ndim == 2 and queries.shape == keys.shape
    for numbers in (ids, log_q):
        fits &= numbers is None or numbers.shape == queries.shape[:1]
    if negatives is not None:
        fits &= negatives.ndim == 3 and negatives[:, 0].shape == queries.shape
    problem = problem_of_reduction(reduction)
    if not fits:
        problem = ConfigError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be (queries, dim), "
            "ids or labels and log_q (queries,), and negatives (queries, any number, dim)."
        )
    equal = {"dim": keys.shape[1:], "dtype": keys.dtype}
    equal |= {"whether there are ids": ids is None, "whether there is log_q": log_q is None}
    headers = ranks.agree(call, problem, equal, (len(keys), keys.requires_grad))
    counts = [count for count, _ in headers]
    is_needed = torch.is_grad_enabled() and any(needed for _, needed in headers)
    all_keys = gathered_rows(with_gradient(keys, is_needed), ranks, counts)
    scores = queries @ all_keys.T
    if negatives is not None:
        scores = torch.cat([scores, (negatives @ queries[:, :, None])[:, :, 0]], dim=1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if log_q is not None:
        # Also of a rank's own key: which items are keys is drawn with these probabilities.
        corrections = ranks.gather_rows(log_q.detach(), counts)
        padding = scores.shape[1] - len(corrections)
        scores = scores - functional.pad(corrections, (0, padding))
    places = torch.arange(sum(counts), device=keys.device)
    own_columns = places.split(counts)[ranks.rank]
    if ids is None:
        return _Scored(scores, own_columns, own_columns[:, None] == places, counts)
    is_same = ids[:, None] == ranks.gather_rows(ids, counts)
    return _Scored(scores, own_columns, is_same, counts)


class SampledFrequency(nn.Module):
    """Estimates how many keys of a batch have an item: the inverse of the mean number of steps
    between two such keys.

    `frequency(ids)`: (any number,), the items of this rank's keys. Returns their logarithms, for
    `log_q`. Collective while training, where it counts the items of all ranks as one batch: all
    ranks have the same numbers.
    num_buckets: items share one where there are fewer. rate: weight of the latest step.
    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling, 2019, algorithm 2. There an item is
    in a batch or not; each key counts here, as each is a negative of the others.
    """

    latest: Tensor
    interval: Tensor
    step: Tensor

    def __init__(self, num_buckets: int, rate: float = 0.05) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("latest", torch.zeros(num_buckets))
        self.register_buffer("interval", torch.ones(num_buckets))
        self.register_buffer("step", torch.zeros(()))

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Count the items, if training, and return their log-frequencies, float32."""
        if self.training:
            ranks = ranks_of(None)
            counts = ranks.agree("SampledFrequency", None, {}, len(ids))
            self._count(self._buckets(ranks.gather_rows(ids, counts)))
        return -self.interval[self._buckets(ids)].log()

    def _buckets(self, ids: Tensor) -> Tensor:
        # A factor, so that neighbours do not fill one part of the table alone.
        return (ids.long() * 2654435761) % len(self.interval)

    def _count(self, buckets: Tensor) -> None:
        self.step += 1
        buckets, counts = buckets.unique(return_counts=True)
        latest = self.latest[buckets]
        interval = (self.step - latest) / counts
        mean = self.interval[buckets].lerp(interval, self.rate)
        self.interval[buckets] = torch.where(latest > 0, mean, interval)
        self.latest[buckets] = self.step
