"""Losses of queries against the keys of all ranks' batches."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.scores.counted_queries import (
    Reduction,
    reduced,
    refuse_reduction,
    refuse_temperature,
    scalar_in_words,
)
from lightning_distrec.sharding.scores.rank_group import (
    Numbers,
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
    batch = _Batch(
        "in_batch_loss", queries, keys, ids=ids, log_q=log_q, negatives=negatives, gather=gather
    )
    scores = batch.scores(temperature, reduction)
    is_other = batch.is_same().scatter(1, batch.own_columns[:, None], False)
    num_keys = is_other.shape[1]
    scores[:, :num_keys].masked_fill_(is_other, -torch.inf)
    losses = functional.cross_entropy(scores, batch.own_columns, reduction="none")
    return batch.reduced(losses, reduction)


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
    batch = _Batch(
        "contrastive_loss", queries, keys, ids=labels, negatives=negatives, gather=gather
    )
    scores = batch.scores(temperature, reduction)
    is_same = batch.is_same()
    num_keys = is_same.shape[1]
    positives = scores[:, :num_keys].where(is_same, 0)
    losses = scores.logsumexp(1) - positives.sum(1) / is_same.sum(1)
    return batch.reduced(losses, reduction)


class _Batch:
    """The queries of this rank, and the keys of all ranks.

    After `scores`, own_columns are the columns of the queries' own keys, (queries,).
    """

    own_columns: Tensor

    def __init__(
        self,
        call: str,
        queries: Tensor,
        keys: Tensor,
        *,
        ids: Tensor | None,
        log_q: Tensor | None = None,
        negatives: Tensor | None,
        gather: bool,
    ) -> None:
        self.call = call
        self.queries = queries
        self.keys = keys
        self.ids = ids
        self.log_q = log_q
        self.negatives = negatives
        self.ranks = ranks_of(None) if gather else RankGroup()
        self.counts: list[int] = []
        """How many queries each rank has."""

    def _fits(self) -> bool:
        queries = self.queries
        fits = queries.ndim == 2 and queries.shape == self.keys.shape
        for numbers in (self.ids, self.log_q):
            fits &= numbers is None or numbers.shape == queries.shape[:1]
        if self.negatives is not None:
            fits &= self.negatives.ndim == 3 and self.negatives[:, 0].shape == queries.shape
        return fits

    def scores(self, temperature: float | Tensor, reduction: Reduction) -> Tensor:
        """Collective. Return (queries, keys of all ranks and own negatives), float32 or float64."""

        def prepare() -> tuple[None, Numbers]:
            refuse_reduction(reduction)
            refuse_temperature(temperature)
            if not self._fits():
                shapes = tuple(self.queries.shape), tuple(self.keys.shape)
                raise ConfigError(
                    f"queries {shapes[0]} and keys {shapes[1]} must be (queries, dim), ids or "
                    "labels and log_q (queries,), and negatives (queries, any number, dim)."
                )
            return None, (len(self.keys), self.keys.requires_grad)

        equal = {
            "reduction": reduction,
            "temperature": scalar_in_words(temperature),
            "dim": tuple(self.keys.shape[1:]),
            "dtype": self.keys.dtype,
            "whether there are ids": self.ids is not None,
            "whether there is log_q": self.log_q is not None,
        }
        _, headers = self.ranks.agree(self.call, equal, prepare)
        self.counts = [count for count, _ in headers]
        needs_gradient = any(needed for _, needed in headers)
        keys = with_gradient(self.keys, torch.is_grad_enabled() and needs_gradient)
        all_keys = gathered_rows(keys, self.ranks, self.counts)
        scores = self.queries @ all_keys.T
        if self.negatives is not None:
            own_scores = self.negatives @ self.queries[:, :, None]
            scores = torch.cat([scores, own_scores[:, :, 0]], dim=1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
        if self.log_q is not None:
            # Also of a rank's own key: which items are keys is drawn with these probabilities.
            corrections = self.ranks.gather_rows(self.log_q.detach(), self.counts)
            padding = scores.shape[1] - len(corrections)
            scores = scores - functional.pad(corrections, (0, padding))
        columns = torch.arange(len(all_keys), device=keys.device)
        self.own_columns = columns.split(self.counts)[self.ranks.rank]
        return scores

    def is_same(self) -> Tensor:
        """Collective. Return whether a key is of a query's item, (queries, keys of all ranks)."""
        if self.ids is not None:
            return self.ids[:, None] == self.ranks.gather_rows(self.ids, self.counts)
        columns = torch.arange(sum(self.counts), device=self.keys.device)
        return self.own_columns[:, None] == columns

    def reduced(self, losses: Tensor, reduction: Reduction) -> Tensor:
        """Collective for "global_mean". Return what is asked for of losses, (queries,)."""
        if reduction == "none":
            return losses
        return reduced(losses, reduction, self.counts, self.ranks)


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
            settings = {"num_buckets": len(self.interval), "rate": self.rate}
            num_ids = (len(ids), 0)
            _, headers = ranks.agree("SampledFrequency", settings, lambda: (None, num_ids))
            counts = [count for count, _ in headers]
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
