"""Predicts the next film of a sequence: SASRec on MovieLens-100k, its item table sharded over the
ranks."""
