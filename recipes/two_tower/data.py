"""The batches: a person with the films seen so far, and the film seen next."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute
from torch import Tensor

from lightning_distrec.errors import ConfigError
from recipes.movielens.columns import FolderColumns, film_table, people_table
from recipes.movielens.sequences import Sequences, leave_one_out
from recipes.two_tower.features import FILM, PERSON

# Every tenth example trains with an unknown person, so that the model can serve somebody who is not
# in the data.
UNKNOWN_EVERY = 10


class NextFilmDataModule(FolderColumns):
    """Which film will this person rate next? Leaves one out: the last film tests, the one before
    validates.

    `ids` of a batch are the features of people, then those of films. `label`: (batch_size, 2): the
    film's position in the catalogue, and which row of its part this is.
    """

    films: pa.Table
    """The catalogue: what films are made of."""
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
            data_dir: folder with one .inter, one .user and one .item file. Left out:
                MovieLens-100k, downloaded once.
            cache_dir: where the download is kept.
            batch_size: events per rank and step; all ranks' other films are the negatives of each.
            history_length: how many of the person's latest films the model sees.
            num_workers: processes that build batches; 0 builds them in the training process, which
                is fast enough here.
        """
        if batch_size < 2 or history_length < 1:
            raise ConfigError(
                f"batch_size={batch_size}, history_length={history_length}: the first must be at "
                "least 2, "
                "since the negatives are the batch's other films, and the second at least 1."
            )
        person = PERSON | {"history": replace(PERSON["history"], max_length=history_length)}
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        labels = ["film", "row"]
        super().__init__(person | FILM, labels, data_dir=data_dir, cache_dir=cache_dir, **sizes)
        self.history_length = history_length

    def setup(self, stage: str | None = None) -> None:
        """Read the folder and split it; every process does this, with the same result.

        Raises DataError: the folder is missing or malformed, or nobody has three films.
        """
        if self.groups:
            return
        folder = self.read_folder()
        self.sequences, self.films = leave_one_out(folder.ratings), film_table(folder)
        people = people_table(folder)
        self.sources |= {part: self._examples(part, people) for part in ("train", "val", "test")}
        super().setup(stage)

    def _examples(self, part: str, people: pa.Table) -> pa.Table:
        """Return a row for each event of a part."""
        events = self.sequences.parts[part]
        rows, film = np.arange(len(events)), self.sequences.items[events] - 1
        tables = people.take(self.sequences.users[events]), self.films.take(film)
        columns = {name: table[name] for table in tables for name in table.column_names}
        hidden = pa.array((rows % UNKNOWN_EVERY == 0) & (part == "train"))
        return pa.table({
            **columns,
            "user": compute.if_else(hidden, None, columns["user"]),
            "history": self._histories(events),
            "film": film,
            "row": rows,
        })

    def _histories(self, events: np.ndarray) -> pa.Array:
        """Return the items of the films just before each event, a list for each."""
        films, lengths = self.sequences.histories(events, self.history_length)
        items = self.films["item"].take(films[films > 0] - 1).combine_chunks()
        return pa.ListArray.from_arrays(np.append(0, lengths.cumsum()).astype(np.int32), items)

    def watched(self) -> np.ndarray:
        """Return how often each film was watched in training, (num_films,)."""
        films = self.sequences.items[self.sequences.parts["train"]] - 1
        return np.bincount(films, minlength=len(self.films))

    def seen(self, part: str) -> Tensor:
        """Return the films seen before each event of a part, (num_events, most) int64: positions,
        filled up with -1."""
        events = self.sequences.parts[part]
        most = int((events - self.sequences.starts[events]).max())
        return torch.from_numpy(self.sequences.histories(events, most)[0] - 1)

    def film_batch(self, films: slice) -> dict[str, Any]:
        """Return a batch of films of the catalogue, without people."""
        return self.columns.select(FILM)(self.films[films])

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return what the most watched films reach on validation."""
        film = torch.from_numpy(self.sequences.items[self.sequences.parts["val"]] - 1)
        counts = torch.from_numpy(self.watched()).repeat(len(film), 1)
        seen = self.seen("val")
        counts.scatter_(1, seen.where(seen >= 0, seen[:, -1:]), -1)
        target_counts = counts.gather(1, film[:, None])
        # Films that were watched as often share their places: half of them come before.
        ranks = (counts > target_counts).sum(1) + ((counts == target_counts).sum(1) - 1) / 2
        in_top = ranks < 10
        return {
            "most watched": {
                "val_recall_at_10": in_top.double().mean().item(),
                "val_ndcg_at_10": (in_top / torch.log2(ranks + 2)).mean().item(),
            }
        }
