"""Checkpoints as plain dicts, for tests that look into them."""

from pathlib import Path
from typing import Any

from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.load import load
from lightning_distrec.checkpoint.plain_state import map_nested


def plain_checkpoint(path: Path | str) -> dict[str, Any]:
    """Return a checkpoint of whatever form with all its tensors in memory."""

    def read(value: Any, where: str) -> Any:
        return map_nested(materialized(value), where, read)

    return read(load(Path(path), rank=0, num_ranks=1).checkpoint, "")  # type: ignore[no-any-return]
