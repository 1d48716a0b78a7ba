"""Metrics of recommendation and retrieval, right over any number of ranks; memory is bounded, or
can be."""

from lightning_distrec.metrics.click_metrics import (
    GAUC,
    Calibration,
    DecayedAUC,
    NormalizedEntropy,
    WindowedAUC,
)
from lightning_distrec.metrics.retrieval import (
    MRR,
    HitRateAtK,
    NDCGAtK,
    RecallAtK,
    retrieval_metrics,
)
from lightning_distrec.metrics.target_ranks import ranks_in_scores, slice_of_rank, target_ranks
from lightning_distrec.metrics.task_metrics import TaskMetrics

__all__ = [
    "GAUC",
    "MRR",
    "Calibration",
    "DecayedAUC",
    "HitRateAtK",
    "NDCGAtK",
    "NormalizedEntropy",
    "RecallAtK",
    "TaskMetrics",
    "WindowedAUC",
    "ranks_in_scores",
    "retrieval_metrics",
    "slice_of_rank",
    "target_ranks",
]
