"""The batches: a person with the films seen so far, and the film seen next."""

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_distrec.errors import ConfigError
from recipes.loaders import load_batches
from recipes.movielens.folder import fetch_movielens_100k, read_folder
from recipes.movielens.sequences import Sequences, leave_one_out
from recipes.two_tower.features import Catalogue, build_catalogue

# Every tenth example trains with an unknown person, so that the model can serve somebody who is not in the data.
UNKNOWN_EVERY = 10


class NextFilms(Dataset):
    """Events of one part of the split; a batch is cut out of ready arrays in one go."""

    def __init__(self, catalogue: Catalogue, sequences: Sequences, part: str, history_length: int) -> None:
        """part: "train", "val" or "test"."""
        self.catalogue = catalogue
        self.sequences = sequences
        self.events = sequences.parts[part]
        self.history_length = history_length
        self.training = part == "train"
        watched = np.bincount(sequences.items[sequences.parts["train"]], minlength=catalogue.num_films + 1)
        # A film that was never watched counts as watched once: its logarithm must exist.
        self.log_shares = torch.from_numpy(np.log(np.maximum(watched, 1) / len(sequences.parts["train"]))).float()

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of these events; DataLoader calls this once per batch.

        person_ids, person_lengths, film_ids, film_lengths: see Catalogue. item: (batch_size,) int64, the film to find.
        log_share: (batch_size,) float32, logarithm of its share of the training events. seen: (batch_size, most) int64,
        all films seen before, filled up with 0; only in validation and test.
        """
        events = self.events[np.asarray(numbers)]
        users, items = 1 + self.sequences.users[events], torch.from_numpy(self.sequences.items[events])
        if self.training:
            users = np.where(np.asarray(numbers) % UNKNOWN_EVERY == 0, 0, users)
        histories = torch.from_numpy(self.sequences.histories(events, self.history_length)[0])
        batch = self.catalogue.person_batch(torch.from_numpy(users), histories) | self.catalogue.film_batch(items)
        batch |= {"item": items, "log_share": self.log_shares[items]}
        if not self.training:
            most = int((events - self.sequences.starts[events]).max())
            batch["seen"] = torch.from_numpy(self.sequences.histories(events, most)[0])
        return batch


class NextFilmDataModule(pl.LightningDataModule):
    """Which film will this person rate next? Leaves one out: the last film tests, the one before validates."""

    catalogue: Catalogue
    sequences: Sequences

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str = "data/movielens-100k",
        batch_size: int = 512,
        history_length: int = 20,
        num_workers: int = 0,
    ) -> None:
        """Set where the data is and how batches are made of it.

        Args:
            data_dir: folder with one .inter, one .user and one .item file. Left out: MovieLens-100k, downloaded once.
            cache_dir: where the download is kept.
            batch_size: events per rank and step; the others' films are the negatives of each.
            history_length: how many of the person's latest films the model sees.
            num_workers: processes that build batches; 0 builds them in the training process, which is fast enough here.
        """
        super().__init__()
        if batch_size < 2 or history_length < 1:
            raise ConfigError(
                f"batch_size={batch_size}, history_length={history_length}: the first must be at least 2, "
                "since the negatives are the batch's other films, and the second at least 1."
            )
        self.data_dir = data_dir
        self.cache_dir = cache_dir
        self.batch_size = batch_size
        self.history_length = history_length
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        """Download MovieLens-100k if no folder was given and it is not here yet; one process per node does this."""
        if self.data_dir is None:
            fetch_movielens_100k(Path(self.cache_dir))

    def setup(self, stage: str | None = None) -> None:
        """Read the folder and split it; every process does this, with the same result.

        Raises DataError: the folder is missing or malformed, or nobody has three films.
        """
        if not hasattr(self, "catalogue"):
            folder = read_folder(Path(self.data_dir or self.cache_dir))
            self.catalogue, self.sequences = build_catalogue(folder), leave_one_out(folder.ratings)

    def train_dataloader(self) -> DataLoader:
        """Events in random order."""
        return self._dataloader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """One event of each person."""
        return self._dataloader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader:
        """One event of each person."""
        return self._dataloader("test", shuffle=False)

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return what the most watched films reach on validation."""
        watched = torch.bincount(
            torch.from_numpy(self.sequences.items[self.sequences.parts["train"]]),
            minlength=self.catalogue.num_films + 1,
        )
        data = NextFilms(self.catalogue, self.sequences, "val", self.history_length)
        batch = data.__getitems__(range(len(data)))
        counts = watched.repeat(len(data), 1).double()
        counts.scatter_(1, batch["seen"], -1.0)
        counts[:, 0] = -1.0
        target_counts = counts.gather(1, batch["item"][:, None])
        # Films that were watched as often share their places: half of them come before.
        ranks = (counts > target_counts).sum(1) + ((counts == target_counts).sum(1) - 1) / 2
        in_top = ranks < 10
        return {
            "most watched": {
                "val_recall_at_10": in_top.double().mean().item(),
                "val_ndcg_at_10": (in_top / torch.log2(ranks + 2)).mean().item(),
            }
        }

    def _dataloader(self, part: str, *, shuffle: bool) -> DataLoader:
        dataset = NextFilms(self.catalogue, self.sequences, part, self.history_length)
        return load_batches(dataset, self.batch_size, shuffle=shuffle, num_workers=self.num_workers)
