"""Keeps the replicas of tables equal that are sharded within groups of ranks."""
