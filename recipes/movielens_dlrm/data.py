"""The batches: MovieLens interactions in order of time, each with what was known just before it."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute
from torch import Tensor

from lightning_distrec.errors import ConfigError, DataError
from recipes.movielens.columns import FolderColumns, film_table, people_table
from recipes.movielens.folder import Folder, Ratings
from recipes.movielens_dlrm.baseline import Scores, mean_rates_score
from recipes.movielens_dlrm.features import DENSE, FEATURES, count_past, is_old_user, latest_items

# The first digit of a US zip code is a group of states. More digits would single out people.
ZIP_PREFIX_LENGTH = 1


class MovieLensDataModule(FolderColumns):
    """Will this user like this film? A rating of 4 or more is a like.

    Split by time: the oldest interactions train, the next validate, the newest test. Every feature
    that counts something counts strictly earlier interactions only.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str = "data/movielens-100k",
        batch_size: int = 512,
        history_length: int = 20,
        like_from_rating: float = 4.0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        """Set where the data is and how it is split into batches.

        Args:
            data_dir: folder with one .inter, one .user and one .item file. Left out:
                MovieLens-100k, downloaded once.
            cache_dir: where the download is kept.
            batch_size: interactions per rank and step.
            history_length: how many of the user's latest likes, and as many dislikes, the model
                sees.
            like_from_rating: the lowest rating that is a like.
            val_fraction: share of the interactions that validates.
            test_fraction: share of the interactions, the newest, that tests.
            num_workers: processes that build batches; 0 builds them in the training process, which
                is fast enough here.
        """
        if batch_size < 1 or history_length < 1:
            raise ConfigError(
                f"batch_size={batch_size}, history_length={history_length}: both "
                "must be at least 1."
            )
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ConfigError(
                f"val_fraction={val_fraction}, test_fraction={test_fraction}: "
                "both must be above 0 and leave some to train on."
            )
        histories = ("recent_likes", "recent_dislikes")
        lengths = {name: replace(FEATURES[name], max_length=history_length) for name in histories}
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        super().__init__(
            FEATURES | lengths, "like", data_dir=data_dir, cache_dir=cache_dir, **sizes
        )
        self.history_length = history_length
        self.like_from_rating = like_from_rating
        self.fractions = (val_fraction, test_fraction)
        self.events: dict[str, range] = {}
        self.ratings: Ratings

    def setup(self, stage: str | None = None) -> None:
        """Read the folder and split it; every process does this, with the same result.

        Raises DataError: the folder is missing or malformed, or a part of the split would be empty.
        """
        if self.events:
            return
        folder = self.read_folder()
        table = build_table(
            folder, history_length=self.history_length, like_from_rating=self.like_from_rating
        )
        train_end, val_end = split_times(folder.ratings.times, *self.fractions)
        events = {
            "train": range(train_end),
            "val": range(train_end, val_end),
            "test": range(val_end, len(table)),
        }
        for name, part in events.items():
            if len(part) == 0:
                raise DataError(
                    f"{self.folder}: nothing to {name} with; {len(table)} interactions cannot be "
                    "split by time."
                )
        self.sources |= {name: table.slice(part.start, len(part)) for name, part in events.items()}
        self.events, self.ratings = events, folder.ratings
        super().setup(stage)

    def baseline(self, split: str) -> Scores:
        """Score the mean-rates baseline on "train", "val" or "test"; call after setup."""
        return mean_rates_score(*self._columns("train"), *self._columns(split))

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return the baseline's validation metrics, for Report; call after setup."""
        scores = self.baseline("val")
        return {"mean-rates baseline": {"val_auroc": scores.auroc, "val_log_loss": scores.log_loss}}

    def _columns(self, split: str) -> list[Tensor]:
        # Not the feature "user": that one hides new users, while an average may use all it has.
        events = slice(self.events[split].start, self.events[split].stop)
        likes = self.ratings.ratings >= self.like_from_rating
        users, items, labels = (
            column[events] for column in (self.ratings.users, self.ratings.items, likes)
        )
        return [torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(labels).float()]


def build_table(folder: Folder, *, history_length: int, like_from_rating: float) -> pa.Table:
    """Turn a folder into a row for each interaction, in order of time, with the columns of FEATURES
    and `like`."""
    ratings = folder.ratings
    likes = (ratings.ratings >= like_from_rating).astype(np.int64)
    people, films = people_table(folder).take(ratings.users), film_table(folder).take(ratings.items)
    user, item = people["user"], films["item"].combine_chunks()
    user_past = count_past(ratings.users, ratings.times, likes)
    item_past = count_past(ratings.items, ratings.times, likes)
    dense = [*user_past.dense_columns(), *item_past.dense_columns()]
    num_dislikes = user_past.events - user_past.likes
    return pa.table({
        **{name: people[name] for name in ("age", "gender", "occupation")},
        **{name: films[name] for name in ("item", "genres", "year")},
        "user": compute.if_else(is_old_user(ratings.users, ratings.times), user, None),
        "zip": compute.utf8_slice_codeunits(people["zip"], 0, ZIP_PREFIX_LENGTH),
        "recent_likes": latest_items(ratings.users, item, likes, user_past.likes, history_length),
        "recent_dislikes": latest_items(
            ratings.users, item, 1 - likes, num_dislikes, history_length
        ),
        **dict(zip(DENSE, dense, strict=True)),
        "like": likes,
    })


def split_times(times: np.ndarray, val_fraction: float, test_fraction: float) -> tuple[int, int]:
    """Return where validation and test begin, so that events at the same time stay on one side.

    times: (num_events,), ascending.
    """
    first_of_val = round(len(times) * (1 - val_fraction - test_fraction))
    first_of_test = round(len(times) * (1 - test_fraction))
    return _start_of_tie(times, first_of_val), _start_of_tie(times, first_of_test)


def _start_of_tie(times: np.ndarray, position: int) -> int:
    position = min(position, len(times) - 1)
    return int(np.searchsorted(times, times[position], side="left")) if len(times) else 0
