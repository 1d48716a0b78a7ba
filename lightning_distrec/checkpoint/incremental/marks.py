"""What a marker says of a checkpoint that belongs to a series of full ones and differences."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_distrec.errors import CheckpointError

INCREMENTAL = "incremental"
"""Key in the marker."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Of a full checkpoint, or of a difference, in a series of one job."""

    id: str
    """Drawn for each; a folder that was replaced under the same name has another."""
    series: str
    """What all checkpoints of one job say."""
    base_name: str = ""
    """The folder of the full checkpoint that a difference is to be laid over, next to its own; "" for a full one."""
    base_id: str = ""
    changed: dict[str, int]
    """Full name of a table -> rows that the difference has of it; the other tables are in it in full."""
    row_bits: int = 32
    """Bits a number of the rows of float32 tables; differences of early versions may have 8, which is not exact."""

    @property
    def is_difference(self) -> bool:
        """Whether it needs a base."""
        return bool(self.base_name)


def mark_of(path: Path, marker: Mapping[str, Any] | None) -> Mark | None:
    """Return what a marker says, None for checkpoints of no series. Raises CheckpointError: it is damaged."""
    fields = (marker or {}).get(INCREMENTAL)
    if fields is None:
        return None
    try:
        mark = Mark(**fields)
        if not (mark.id and all(isinstance(t, str) for t in (mark.id, mark.series, mark.base_name, mark.base_id))):
            raise TypeError("no text")
        if os.path.basename(mark.base_name) != mark.base_name or not isinstance(mark.changed, dict):
            raise TypeError(f"a base {mark.base_name!r}")
        if mark.row_bits not in (8, 32):
            raise TypeError(f"{mark.row_bits!r} bits")
    except TypeError as error:
        raise CheckpointError(f"{path} is damaged: its marker says {fields!r} of its base ({error}).") from None
    return mark
