"""Losses and nearest rows over item tables, which stay sharded: functions for the steps of a
module."""

from lightning_distrec.retrieval.in_batch import SampledFrequency, contrastive_loss, in_batch_loss
from lightning_distrec.retrieval.ranks_in_table import target_ranks_in_table
from lightning_distrec.retrieval.sampled_softmax import (
    Sampler,
    by_frequency,
    sampled_softmax_loss,
)
from lightning_distrec.sharding.scores.full_softmax import softmax_loss
from lightning_distrec.sharding.scores.nearest import top_k

__all__ = [
    "SampledFrequency",
    "Sampler",
    "by_frequency",
    "contrastive_loss",
    "in_batch_loss",
    "sampled_softmax_loss",
    "softmax_loss",
    "target_ranks_in_table",
    "top_k",
]
