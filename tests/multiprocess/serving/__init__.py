"""Serving while ranks train."""
