"""What a run leaves, for use without this package: a trained module as a folder that answers (see
artifact.py), a checkpoint as one plain file (see export_checkpoint.py)."""
