"""A trained module as a folder that answers without this package: see artifact.py."""
