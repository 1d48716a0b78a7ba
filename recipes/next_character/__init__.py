"""Writes on in the manner of Python's manual: a small transformer, every rank with a whole copy of it."""
