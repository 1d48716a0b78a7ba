"""Ids that a step computes from its batch: its operations are recorded, and repeated ahead for later batches."""
