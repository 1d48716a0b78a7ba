"""Callbacks that watch a fit and change nothing in it: how fast, how many bytes, and what overlaps what."""
