"""Predicts who likes which film: a DLRM-style model on MovieLens-100k, its tables sharded over the
ranks."""
