"""Predicts clicks and purchases at once: a multi-gate mixture of experts (MMoE) over sharded
tables."""
