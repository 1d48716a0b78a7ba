"""Metrics of recommendation and retrieval, right over any number of ranks; memory is bounded, or can be."""

from lightning_distrec.metrics.calibration import Calibration
from lightning_distrec.metrics.decayed_auc import DecayedAUC
from lightning_distrec.metrics.gauc import GAUC
from lightning_distrec.metrics.normalized_entropy import NormalizedEntropy
from lightning_distrec.metrics.ranking import ranks_in_scores
from lightning_distrec.metrics.retrieval import MRR, HitRateAtK, NDCGAtK, RecallAtK, retrieval_metrics
from lightning_distrec.metrics.target_ranks import slice_of_rank, target_ranks
from lightning_distrec.metrics.task_metrics import TaskMetrics
from lightning_distrec.metrics.windowed_auc import WindowedAUC

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
