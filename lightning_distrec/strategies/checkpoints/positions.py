"""Training goes on in the middle of an epoch: dataloaders keep their position, and Lightning its count of batches."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec.pipeline.position import PositionedLoader, resumable

COUNTERS = ("ready", "started", "processed", "completed")


class Positions:
    """The positions of one fit's training loaders."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._loaders: list[Any] = []

    def keep(self, loader: Any) -> Any:
        """Return the loader, with a position that checkpoints hold where it can have one."""
        kept = resumable(loader, self._rank, self._num_ranks, rank_zero_warn)
        self._loaders.append(kept)
        return kept

    @property
    def are_kept(self) -> bool:
        """Whether all loaders keep their position here; such ones draw no random numbers before their first batch."""
        return all(isinstance(loader, PositionedLoader) for loader in self._loaders)

    def resume(self, trainer: Trainer) -> None:
        """When training starts: let Lightning count the batches that are behind the positions which were loaded.

        With another batch size, or where a position was of no use, these are not those that were counted.
        """
        progress = trainer.fit_loop.epoch_loop.batch_progress
        kept = [loader for loader in self._loaders if isinstance(loader, PositionedLoader)]
        if not kept or progress.is_last_batch or not trainer.fit_loop.restarting:
            return
        behind = int(max(kept, key=len).state["batches"]) - progress.current.ready
        for counter in COUNTERS:
            setattr(progress.current, counter, getattr(progress.current, counter) + behind)
