"""Runs a recipe under several strategies and numbers of devices, measures it and compares the
results."""
