"""Marks what lightning_distrec computes inside of the user's step, while the operations of that step are recorded.

A sharded table exchanges ids and rows where the step calls it. These operations are not the user's: a recorder leaves
them out, and is given the rows that come of them.
"""

from collections.abc import Callable
from typing import Any


class OwnOperations:
    """A context that may be entered inside of itself. Threads of ours compute nothing that is recorded."""

    depth = 0
    note_rows: Callable[[str, Any], None] | None = None
    """Set while a step is recorded: called with the path of a table and what a call of it returned."""

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


OWN = OwnOperations()
