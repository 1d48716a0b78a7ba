"""What the two towers see of a person and of a film. Id 0 of each table is kept for "unknown"."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipes.movielens.folder import Folder
from recipes.movielens.ids import (
    AGE_EDGES,
    YEAR_EDGES,
    Bags,
    bags_of_words,
    check_fits,
    ids_of_numbers,
    ids_of_texts,
)

# Sizes are fixed, with room to spare, so that a checkpoint does not depend on the folder it was trained on.
PERSON_TABLES = {"user": 16_384, "history": 8_192, "age": 16, "gender": 8, "occupation": 64}
FILM_TABLES = {"item": 8_192, "genres": 64, "year": 32}
"""Feature, which is also its table's name -> rows."""


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The features of all people and films, by id; those of id 0 are unknown."""

    people: dict[str, Tensor]
    """age, gender, occupation: (1 + num_users,) int64."""
    films: dict[str, Tensor]
    """year: (1 + num_items,) int64."""
    genres: Bags
    """One bag for each film."""
    titles: list[str]
    """Title and year of each film; the first is empty."""

    @property
    def num_films(self) -> int:
        """How many films there are; their ids are 1 to this number."""
        return len(self.titles) - 1

    def person_batch(self, users: Tensor, histories: Tensor) -> dict[str, Tensor]:
        """Return the ids and lengths of a batch of people, feature after feature in the order of PERSON_TABLES.

        users: (B,) int64, 0 for somebody unknown. histories: (B, length) int64, 0 where there is no film.
        """
        ones = torch.ones_like(users)
        ids = [users, histories[histories > 0], *(column[users] for column in self.people.values())]
        lengths = [ones, (histories > 0).sum(1), *(ones for _ in self.people)]
        return {"person_ids": torch.cat(ids), "person_lengths": torch.cat(lengths)}

    def film_batch(self, items: Tensor) -> dict[str, Tensor]:
        """Return the ids and lengths of a batch of films, feature after feature in the order of FILM_TABLES.

        items: (B,) int64.
        """
        genres, num_genres = self.genres.take(items)
        ones = torch.ones_like(items)
        return {
            "film_ids": torch.cat([items, genres, self.films["year"][items]]),
            "film_lengths": torch.cat([ones, num_genres, ones]),
        }


def build_catalogue(folder: Folder) -> Catalogue:
    """Number what a folder says of people and films. Raises DataError: more values than a table has rows."""
    people, films = folder.user_columns, folder.item_columns
    check_fits(len(people["age"]), PERSON_TABLES["user"], "users")
    check_fits(len(films["genres"]), FILM_TABLES["item"], "items")
    genres = bags_of_words(["", *films["genres"]], FILM_TABLES["genres"], "genres")
    return Catalogue(
        people={
            "age": _from_1(ids_of_numbers(people["age"], AGE_EDGES)),
            "gender": _from_1(ids_of_texts(people["gender"], PERSON_TABLES["gender"], "genders")),
            "occupation": _from_1(ids_of_texts(people["occupation"], PERSON_TABLES["occupation"], "occupations")),
        },
        films={"year": _from_1(ids_of_numbers(films["release_year"], YEAR_EDGES))},
        genres=genres,
        titles=["", *_titles(films["title"], films["release_year"])],
    )


def _from_1(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], ids]).astype(np.int64))


def _titles(titles: Sequence[str], years: Sequence[str]) -> list[str]:
    return [f"{title} ({year})" if year else title for title, year in zip(titles, years, strict=True)]
