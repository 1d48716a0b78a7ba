"""Sharded module to file and back."""
