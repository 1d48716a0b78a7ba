"""Checkpoints by difference: rows that have changed since a full checkpoint, which the folder names."""
