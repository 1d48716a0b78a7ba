"""Checkpoints as plain dicts, for tests that look into them."""

from pathlib import Path
from typing import Any

from lightning_distrec.checkpoint.contents import open_checkpoint
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.checkpoint.plain_state import map_nested


def load(path: Path, rank: int = 0, num_ranks: int = 1, pickles: bool = False) -> Loaded:
    """Read a checkpoint of whatever form as one of some ranks does."""
    return open_checkpoint(path).load(rank, num_ranks, pickles)


def plain_checkpoint(path: Path | str) -> dict[str, Any]:
    """Return a checkpoint of whatever form with all its tensors in memory."""
    content = load(Path(path)).checkpoint
    full: dict[str, Any] = map_nested(content, lambda leaf, _: materialized(leaf))
    return full
