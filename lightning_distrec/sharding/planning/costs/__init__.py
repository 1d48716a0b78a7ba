"""What a shard costs in a step: its exchanges, its lookups, its update."""
