"""Predicts the next character of Python's manual: a small transformer, replicated on every rank."""
