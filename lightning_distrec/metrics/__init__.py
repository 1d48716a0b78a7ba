"""Metrics of recommendation and retrieval, right over any number of ranks; their states are bounded in memory."""

from lightning_distrec.metrics.ranking import ranks_in_scores
from lightning_distrec.metrics.retrieval import MRR, HitRateAtK, NDCGAtK, RecallAtK, retrieval_metrics
from lightning_distrec.metrics.target_ranks import slice_of_rank, target_ranks

__all__ = [
    "MRR",
    "HitRateAtK",
    "NDCGAtK",
    "RecallAtK",
    "ranks_in_scores",
    "retrieval_metrics",
    "slice_of_rank",
    "target_ranks",
]
