"""A sharded module's checkpoints: written into folders by all ranks, and read on any number of
ranks."""
