"""What the recorder of a step and the lookups in it share: which operations are ours, and weights
that come later.

A sharded table exchanges ids and rows where the step calls it. These operations are not the user's:
a recorder leaves them out, and is given the rows that come of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LibraryOperations:
    """A context that may be entered inside of itself. Threads of ours compute nothing that is
    recorded."""

    depth = 0
    note_rows: Callable[[str, Any], None] | None = None
    """Set while a step is recorded: called with the path of a table and what a call of it
    returned."""

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


LIBRARY_OPERATIONS = LibraryOperations()


class LateWeights(Tensor):
    """Zeros, for weights of ids that only the step computes, while their ids are sent ahead of it.

    What is computed of them has this class too.
    """

    @staticmethod
    def zeros_for(ids: Tensor) -> Tensor:
        """Return those of `ids`, of any shape."""
        with torch.inference_mode(False):  # writes to inference tensors are not counted
            return torch.zeros(1, device=ids.device).expand(ids.shape).as_subclass(LateWeights)
