"""A chain of blocks split into stages over the ranks."""
