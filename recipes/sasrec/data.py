"""The batches: a person's latest films, and after each of them the next one."""

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_distrec.errors import ConfigError
from recipes.movielens.folder import fetch_movielens_100k, read_folder
from recipes.movielens.sequences import Sequences, leave_one_out


class Windows(Dataset):
    """Windows over the films of each person; each place of a window predicts the film after it."""

    def __init__(self, sequences: Sequences, ends: np.ndarray, length: int) -> None:
        """ends: positions of the events that the windows' last places predict. length: places in a
        window."""
        self.sequences = sequences
        self.ends = ends
        self.length = length

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of these windows; DataLoader calls this once per batch.

        items: (batch_size, length) int64, the oldest film first; 0 after the last one where there
        are fewer.
        following: (batch_size, length) int64, the film after each; 0 where there is none.
        length: (batch_size,) int64, films in each window, at least 1.
        """
        ends = self.ends[np.asarray(numbers)]
        lengths = np.minimum(ends - self.sequences.starts[ends], self.length)
        # "a b 0 0": attention then needs no other mask than the one that hides what comes later.
        is_filled = np.arange(self.length) < lengths[:, None]
        events = np.where(is_filled, (ends - lengths)[:, None] + np.arange(self.length), 0)
        films = self.sequences.items
        return {
            "items": torch.from_numpy(np.where(is_filled, films[events], 0)),
            "following": torch.from_numpy(np.where(is_filled, films[events + 1], 0)),
            "length": torch.from_numpy(lengths),
        }


def window_ends(sequences: Sequences, stride: int) -> np.ndarray:
    """Return where windows over the training events end: each person's last one, and every
    `stride`-th before it.

    An event without one before it ends no window.
    """
    events = sequences.parts["train"]
    starts = sequences.starts[events]
    _, firsts, counts = np.unique(starts, return_index=True, return_counts=True)
    from_end = np.repeat(firsts + counts, counts) - 1 - np.arange(len(events))
    return events[(from_end % stride == 0) & (events > starts)]


class SequenceDataModule(pl.LightningDataModule):
    """Which film comes next? Leaves one out: each person's last film tests, the one before
    validates."""

    windows: type[Windows] = Windows
    """The form of the batches."""
    sequences: Sequences
    num_items: int

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str = "data/movielens-100k",
        batch_size: int = 32,
        length: int = 50,
        stride: int = 10,
        num_workers: int = 0,
    ) -> None:
        """Set where the data is and how batches are made of it.

        Args:
            data_dir: folder with one .inter, one .user and one .item file. Left out:
                MovieLens-100k, downloaded once.
            cache_dir: where the download is kept.
            batch_size: windows per rank and step.
            length: films in a window.
            stride: films between the ends of two windows of the same person, in training.
            num_workers: processes that build batches; 0 builds them in the training process, which
                is fast enough here.
        """
        super().__init__()
        if min(batch_size, length, stride) < 1:
            raise ConfigError(
                f"batch_size={batch_size}, length={length}, stride={stride}: all "
                "must be at least 1."
            )
        self.data_dir = data_dir
        self.cache_dir = cache_dir
        self.batch_size = batch_size
        self.length = length
        self.stride = stride
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        """Download MovieLens-100k if no folder was given and it is not here yet; one process per
        node does this."""
        if self.data_dir is None:
            fetch_movielens_100k(Path(self.cache_dir))

    def setup(self, stage: str | None = None) -> None:
        """Read the folder and split it; every process does this, with the same result.

        Raises DataError: the folder is missing or malformed, or nobody has three films.
        """
        if not hasattr(self, "sequences"):
            folder = read_folder(Path(self.data_dir or self.cache_dir))
            self.sequences = leave_one_out(folder.ratings)
            self.num_items = len(folder.item_columns["genres"])

    def train_dataloader(self) -> DataLoader:
        """Windows over each person's films, in random order."""
        return self._dataloader(window_ends(self.sequences, self.stride), shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """One window of each person, whose last place predicts."""
        return self._dataloader(self.sequences.parts["val"], shuffle=False)

    def test_dataloader(self) -> DataLoader:
        """One window of each person, whose last place predicts."""
        return self._dataloader(self.sequences.parts["test"], shuffle=False)

    def _dataloader(self, ends: np.ndarray, *, shuffle: bool) -> DataLoader:
        return DataLoader(
            self.windows(self.sequences, ends, self.length),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            # page-locked batches go to a GPU while it computes
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            collate_fn=_already_a_batch,  # type: ignore[arg-type]  # __getitems__ makes it
        )


def _already_a_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    # A function at module level, so that workers can receive it.
    return batch
