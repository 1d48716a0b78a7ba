"""Shards are plain tensors to an optimizer, which costs nothing; the guard would cost a microsecond for each operation.

An optimizer's step calls the closure with the user's step and hooks, in which they are guarded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_distrec.sharding.weights.shard_of import without_guard


class PlainShards:
    """From `begin` to `end` shards are plain tensors in this thread."""

    def __init__(self) -> None:
        self._context: Any = None

    def begin(self) -> None:
        """The closure has run, and the update begins."""
        if self._context is None:
            self._context = without_guard()
            self._context.__enter__()

    def end(self) -> None:
        """The update has ended, or the closure is called once more (LBFGS)."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around an optimizer's step."""
        try:
            yield
        finally:
            self.end()


plain_shards = PlainShards()
