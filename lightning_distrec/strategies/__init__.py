"""What `Trainer(strategy=...)` takes: Lightning's hooks, one call into the rooms below per step."""
