"""The batches: MovieLens interactions in order of time, each with what was known just before it."""

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_distrec.errors import ConfigError, DataError
from recipes.loaders import load_batches
from recipes.movielens.folder import Folder, Ratings, fetch_movielens_100k, read_folder
from recipes.movielens.ids import AGE_EDGES, YEAR_EDGES, Bags, bags_of_words, check_fits, ids_of_numbers, ids_of_texts
from recipes.movielens_dlrm.baseline import Scores, mean_rates_score
from recipes.movielens_dlrm.features import FEATURES, TABLES, count_past, ids_of_known_users, latest_items

# The first digit of a US zip code is a group of states. More digits would single out people.
ZIP_PREFIX_LENGTH = 1


class ClickDataset(Dataset):
    """Interactions as examples, in order of time.

    A batch is cut out of ready tensors in one go: `dataset[i]` is a batch of one.
    """

    def __init__(self, *, features: dict[str, Tensor | Bags], dense: Tensor, label: Tensor) -> None:
        """features: each (num_events,) ids or bags of ids; dense: (num_events, num_dense); label: (num_events,)."""
        self.features = features
        self.dense = dense
        self.label = label

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, event: int) -> dict[str, Tensor]:
        return self.__getitems__([event])

    def __getitems__(self, events: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of these events; DataLoader calls this once per batch.

        ids: (sum of lengths,) int64, feature after feature in the order of FEATURES, within it event after event.
        lengths: (num_features * batch_size,) int64: how many ids, in the same order.
        dense: (batch_size, num_dense) float32. label: (batch_size,) float32, 1 for a like.
        """
        rows = torch.as_tensor(events)
        bags = [self._bags(name, rows) for name in FEATURES]
        return {
            "ids": torch.cat([ids for ids, _ in bags]),
            "lengths": torch.cat([lengths for _, lengths in bags]),
            "dense": self.dense[rows],
            "label": self.label[rows],
        }

    def _bags(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        column = self.features[name]
        if isinstance(column, Bags):
            return column.take(rows)
        return column[rows], torch.ones_like(rows)


class MovieLensDataModule(pl.LightningDataModule):
    """Will this user like this film? A rating of 4 or more is a like.

    Split by time: the oldest interactions train, the next validate, the newest test. Every feature that counts
    something counts strictly earlier interactions only.
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
            data_dir: folder with one .inter, one .user and one .item file. Left out: MovieLens-100k, downloaded once.
            cache_dir: where the download is kept.
            batch_size: interactions per rank and step.
            history_length: how many of the user's latest likes, and as many dislikes, the model sees.
            like_from_rating: the lowest rating that is a like.
            val_fraction: share of the interactions that validates.
            test_fraction: share of the interactions, the newest, that tests.
            num_workers: processes that build batches; 0 builds them in the training process, which is fast enough here.
        """
        super().__init__()
        if batch_size < 1 or history_length < 1:
            raise ConfigError(f"batch_size={batch_size}, history_length={history_length}: both must be at least 1.")
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ConfigError(
                f"val_fraction={val_fraction}, test_fraction={test_fraction}: "
                "both must be above 0 and leave some to train on."
            )
        self.data_dir = data_dir
        self.cache_dir = cache_dir
        self.batch_size = batch_size
        self.history_length = history_length
        self.like_from_rating = like_from_rating
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.num_workers = num_workers
        self.splits: dict[str, Subset] = {}
        self.examples: ClickDataset
        self.ratings: Ratings

    def prepare_data(self) -> None:
        """Download MovieLens-100k if no folder was given and it is not here yet; one process per node does this."""
        if self.data_dir is None:
            fetch_movielens_100k(Path(self.cache_dir))

    def setup(self, stage: str) -> None:
        """Read the folder and split it; every process does this, with the same result.

        Raises DataError: the folder is missing or malformed, or a part of the split would be empty.
        """
        if self.splits:
            return
        path = Path(self.data_dir or self.cache_dir)
        folder = read_folder(path)
        examples = build_examples(folder, history_length=self.history_length, like_from_rating=self.like_from_rating)
        train_end, val_end = split_times(folder.ratings.times, self.val_fraction, self.test_fraction)
        parts = {"train": range(train_end), "val": range(train_end, val_end), "test": range(val_end, len(examples))}
        for name, part in parts.items():
            if len(part) == 0:
                raise DataError(
                    f"{path}: nothing to {name} with; {len(examples)} interactions cannot be split by time."
                )
        self.splits = {name: Subset(examples, part) for name, part in parts.items()}
        self.examples = examples
        self.ratings = folder.ratings

    def train_dataloader(self) -> DataLoader:
        """Batches in random order."""
        return self._dataloader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Batches in order of time."""
        return self._dataloader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader:
        """Batches in order of time."""
        return self._dataloader("test", shuffle=False)

    def baseline(self, split: str) -> Scores:
        """Score the mean-rates baseline on "train", "val" or "test"; call after setup."""
        return mean_rates_score(*self._columns("train"), *self._columns(split))

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return the baseline's validation metrics, for Report; call after setup."""
        scores = self.baseline("val")
        return {"mean-rates baseline": {"val_auroc": scores.auroc, "val_log_loss": scores.log_loss}}

    def _columns(self, split: str) -> list[Tensor]:
        # Not the feature "user": that one hides new users, while an average may use all it has.
        events = torch.as_tensor(self.splits[split].indices)
        users, items = torch.from_numpy(self.ratings.users), torch.from_numpy(self.ratings.items)
        return [column[events] for column in (users, items, self.examples.label)]

    def _dataloader(self, split: str, *, shuffle: bool) -> DataLoader:
        dataset = self.splits[split]
        return load_batches(dataset, self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


def build_examples(folder: Folder, *, history_length: int, like_from_rating: float) -> ClickDataset:
    """Turn a folder into examples, in order of time.

    Raises DataError: a vocabulary does not fit its table.
    """
    ratings = folder.ratings
    check_fits(len(folder.user_columns["age"]), TABLES["user"].rows, "users")
    check_fits(len(folder.item_columns["genres"]), TABLES["item"].rows, "items")
    likes = (ratings.ratings >= like_from_rating).astype(np.int64)
    user_past = count_past(ratings.users, ratings.times, likes)
    item_past = count_past(ratings.items, ratings.times, likes)
    zip_prefixes = [code[:ZIP_PREFIX_LENGTH] for code in folder.user_columns["zip_code"]]
    user_features = {
        "age": ids_of_numbers(folder.user_columns["age"], AGE_EDGES),
        "gender": ids_of_texts(folder.user_columns["gender"], TABLES["gender"].rows, "genders"),
        "occupation": ids_of_texts(folder.user_columns["occupation"], TABLES["occupation"].rows, "occupations"),
        "zip": ids_of_texts(zip_prefixes, TABLES["zip"].rows, "zip prefixes"),
    }
    item_features = {"year": ids_of_numbers(folder.item_columns["release_year"], YEAR_EDGES)}
    genres = bags_of_words(folder.item_columns["genres"], TABLES["genre"].rows, "genres")
    features: dict[str, Tensor | Bags] = {
        "user": torch.from_numpy(ids_of_known_users(ratings.users, ratings.times)),
        "item": torch.from_numpy(1 + ratings.items),
        "recent_likes": latest_items(ratings.users, 1 + ratings.items, likes, user_past.likes, history_length),
        "recent_dislikes": latest_items(
            ratings.users, 1 + ratings.items, 1 - likes, user_past.events - user_past.likes, history_length
        ),
        "genres": genres.select(torch.from_numpy(ratings.items)),
    }
    features |= {name: torch.from_numpy(ids[ratings.users]) for name, ids in user_features.items()}
    features |= {name: torch.from_numpy(ids[ratings.items]) for name, ids in item_features.items()}
    dense = np.stack([*user_past.dense_columns(), *item_past.dense_columns()], axis=1)
    return ClickDataset(features=features, dense=torch.from_numpy(dense).float(), label=torch.from_numpy(likes).float())


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
