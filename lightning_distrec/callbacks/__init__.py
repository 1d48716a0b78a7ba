"""Callbacks: how fast a fit goes, how many bytes, what overlaps what; and learning rates that follow the ranks."""
