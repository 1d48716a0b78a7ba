"""Callbacks: throughput, bytes sent, traces, plans, and learning rates scaled by the number of
ranks."""
