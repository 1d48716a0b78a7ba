"""Means over queries of what the ranks of their targets are worth: recall@k, hit rate@k, NDCG@k,
MRR."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics.click_metrics import running_sums


class QueryMean(Metric):
    """Mean over all queries of all ranks, each rank of processes with its own queries. Two numbers
    of memory.

    `update(ranks)`: ranks of targets among all candidates, from 1, (queries,) or (queries,
    targets), as `target_ranks` and `ranks_in_scores` return them; 0: no target here. A query
    without targets does not count. NaN without queries.

    Args:
        k: how many of the first ranks count; None: all of them.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    name = ""
    queries: Tensor

    def __init__(self, k: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if k is not None and k < 1:
            raise ConfigError(f"{type(self).__name__}: k={k} must be at least 1.")
        self.k = k
        # A MetricCollection lets metrics share states which are called alike and are equal after
        # the first batch. Those of recall@10 and recall@20 often are, and differ later.
        self._sum = f"{self.name}_{k}_sum"
        self.add_state(self._sum, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("queries", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, ranks: Tensor) -> None:
        if ranks.ndim not in (1, 2) or ranks.is_floating_point():
            raise ConfigError(
                f"{type(self).__name__}: ranks {tuple(ranks.shape)} of {ranks.dtype} must be "
                "integers, (queries,) or (queries, targets). target_ranks and ranks_in_scores "
                "return them."
            )
        ranks = ranks if ranks.ndim == 2 else ranks[:, None]
        present = ranks >= 1
        counted = present.any(1)
        hits = present if self.k is None else present & (ranks <= self.k)
        values = self._values(ranks, present, hits)
        setattr(self, self._sum, getattr(self, self._sum) + torch.where(counted, values, 0).sum())
        self.queries = self.queries + counted.sum()

    @override
    def compute(self) -> Tensor:
        """Return the mean, float32."""
        return (getattr(self, self._sum) / self.queries).float()

    def _values(self, ranks: Tensor, present: Tensor, hits: Tensor) -> Tensor:
        """Return each query's value, float64. present, hits: where there is a target, and one that
        counts."""
        raise NotImplementedError


class RecallAtK(QueryMean):
    """Share of a query's targets that are among the first k."""

    name = "recall"

    @override
    def _values(self, ranks: Tensor, present: Tensor, hits: Tensor) -> Tensor:
        return hits.sum(1).double() / present.sum(1)


class HitRateAtK(QueryMean):
    """Share of queries with a target among the first k. With one target for each query it is
    recall@k."""

    name = "hit_rate"

    @override
    def _values(self, ranks: Tensor, present: Tensor, hits: Tensor) -> Tensor:
        return hits.any(1).double()


class NDCGAtK(QueryMean):
    """Sum of 1 / log2(1 + rank) over a query's targets among the first k, divided by the largest it
    could be."""

    name = "ndcg"

    @override
    def _values(self, ranks: Tensor, present: Tensor, hits: Tensor) -> Tensor:
        gained = torch.where(hits, 1 / torch.log2(1 + ranks.clamp_min(1).double()), 0).sum(1)
        places = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
        best = running_sums((1 / torch.log2(1 + places.double()))[: self.k])
        return gained / best[(present.sum(1).clamp(1, len(best)) - 1)]


class MRR(QueryMean):
    """Mean of 1 / rank of each query's best target, 0 where it is beyond k."""

    name = "mrr"

    @override
    def _values(self, ranks: Tensor, present: Tensor, hits: Tensor) -> Tensor:
        return torch.where(hits, 1 / ranks.clamp_min(1).double(), 0).amax(1)


def retrieval_metrics(*ks: int, prefix: str = "") -> MetricCollection:
    """Return recall_at_K, hit_rate_at_K and ndcg_at_K for each of ks, and mrr, as one collection
    for `self.log_dict`.

    prefix: begins each name, such as "val/". Raises ConfigError: no k, or one below 1.
    """
    if not ks:
        raise ConfigError(
            "retrieval_metrics: at least one k is needed, such as retrieval_metrics(10, 100)."
        )
    metrics: dict[str, Metric | MetricCollection] = {
        f"{kind.name}_at_{k}": kind(k) for k in ks for kind in (RecallAtK, HitRateAtK, NDCGAtK)
    }
    return MetricCollection({**metrics, "mrr": MRR()}, prefix=prefix or None)
