"""Finds the films that a person may watch next: two towers on MovieLens-100k, with an index and a
query at the end."""
