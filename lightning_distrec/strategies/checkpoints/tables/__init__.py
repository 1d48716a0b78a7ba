"""Sharded tables as checkpoints see them: how their state lies along them, and which rows have changed."""
