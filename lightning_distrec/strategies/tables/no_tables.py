"""What a run has in the place of sharded tables, and of their prefetching, where it has none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_distrec.prefetch.fetcher import ReadyBatch

NOTHING = nullcontext()


class NoTables:
    """In the place of a RunTables: the module has no tables, and trains as under DDP."""

    groups = None

    def before_training_step(self) -> None:
        """Do nothing."""

    def begin_step(self) -> None:
        """Do nothing."""

    def before_evaluation_step(self) -> None:
        """Do nothing."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return NOTHING

    def synchronize(self) -> None:
        """Do nothing."""

    def check_steps(self) -> None:
        """Do nothing."""

    def before_backward(self) -> None:
        """Do nothing."""

    def loss_factor(self) -> float:
        """Return 1: all ranks count alike."""
        return 1.0


class NoPrefetching:
    """In the place of a Prefetching: each lookup exchanges its ids when it is called."""

    def step(self, batch: Any, has_backward: bool) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return NOTHING

    def take(self, ready: ReadyBatch) -> Any:
        """Return the batch."""
        return ready.batch

    def before_backward(self) -> None:
        """Do nothing."""
