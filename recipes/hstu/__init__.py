"""Predicts the next film of a sequence: HSTU on MovieLens-100k, with times, its item table sharded
over the ranks."""
