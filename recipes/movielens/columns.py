"""A MovieLens folder as columns for ColumnData: what the recipes that use it have in common."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from lightning_distrec.data import ColumnData
from lightning_distrec.data.features import Feature
from recipes.movielens.folder import Folder, fetch_movielens_100k, read_folder

AGE_EDGES = (18, 25, 30, 35, 40, 45, 50, 56, 65)
YEAR_EDGES = (1940, 1950, 1960, 1970, 1975, 1980, 1985, 1988, *range(1990, 2021))


class FolderColumns(ColumnData):
    """Batches of the tables that a subclass makes of a folder in its setup."""

    def __init__(
        self,
        features: Mapping[str, Feature],
        label: str | list[str],
        *,
        data_dir: str | None,
        cache_dir: str,
        batch_size: int,
        num_workers: int,
    ) -> None:
        """data_dir: the folder; None: MovieLens-100k, which is kept in cache_dir. The others: see
        ColumnData."""
        # Tables come with setup: until then there is no file.
        super().__init__([], dict(features), label, batch_size=batch_size, num_workers=num_workers)
        self.folder = Path(data_dir or cache_dir)
        self.is_downloaded = data_dir is None

    def prepare_data(self) -> None:
        """Download MovieLens-100k if no folder was given and it is not here yet; one process per
        node does this."""
        if self.is_downloaded:
            fetch_movielens_100k(self.folder)

    def read_folder(self) -> Folder:
        """Read the folder. Raises DataError: it is missing or malformed."""
        return read_folder(self.folder)


def people_table(folder: Folder) -> pa.Table:
    """Return user, age, gender, occupation and zip of each person; what is empty, or no whole
    number, is missing."""
    people = folder.user_columns
    texts = {name: _texts(people[name]) for name in ("gender", "occupation")}
    user, code = _texts(people["user_id"]), _texts(people["zip_code"])
    return pa.table({"user": user, "age": _whole_numbers(people["age"]), **texts, "zip": code})


def film_table(folder: Folder) -> pa.Table:
    """Return item, genres and year of each film; what is empty, or no whole number, is missing."""
    films = folder.item_columns
    texts = {"item": _texts(films["item_id"]), "genres": _texts(films["genres"])}
    return pa.table({**texts, "year": _whole_numbers(films["release_year"])})


def _texts(texts: list[str]) -> pa.Array:
    return pa.array([text or None for text in texts], pa.string())


def _whole_numbers(texts: list[str]) -> pa.Array:
    return pa.array([int(text) if text.isdecimal() else None for text in texts], pa.int64())
