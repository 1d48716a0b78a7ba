"""Watches that updates inside of backward are updates at `step`: one backward, then one step."""

from lightning_distrec.errors import OptimizerError


class BackwardWatch:
    """Counts backward passes and steps of a run with fused tables.

    A fused table is updated by every backward. That is what the user's optimizer does as long as each backward is
    followed by one `step`; accumulation that begins while training, or an `optimizer_step` that skips steps, breaks it.
    """

    def __init__(self, fused_tables: list[str]) -> None:
        self._tables = fused_tables
        self._pending = False

    def backward(self) -> None:
        """A backward is about to begin. Raises OptimizerError: the one before it was not followed by a step."""
        if self._pending and self._tables:
            raise OptimizerError(
                f"a second backward before optimizer.step(), but table '{self._tables[0]}' is updated inside of every "
                "backward (accumulate_grad_batches was changed, or optimizer_step skips steps). "
                "Set embedding_update='sparse', or 'dense' for RowWiseAdagrad."
            )
        self._pending = True

    def step(self) -> None:
        """An optimizer has stepped."""
        self._pending = False
