"""The DataLoader of the recipes: their datasets cut a batch out of ready arrays, so nothing is left to collate."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def load_batches(dataset: Dataset, batch_size: int, *, shuffle: bool, num_workers: int) -> DataLoader:
    """Return a loader of what `dataset.__getitems__` returns for the indices of each batch."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),  # page-locked batches go to a GPU while it computes
        persistent_workers=num_workers > 0,
        collate_fn=_already_a_batch,
    )


def _already_a_batch(batch: Any) -> Any:
    # A function at module level, so that workers can receive it.
    return batch
