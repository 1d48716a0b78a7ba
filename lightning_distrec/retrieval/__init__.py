"""Losses and nearest rows over item tables, which stay sharded: functions for the steps of a
module."""

from lightning_distrec.retrieval.full_softmax import softmax_loss

__all__ = ["softmax_loss"]
