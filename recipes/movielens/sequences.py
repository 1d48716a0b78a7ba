"""Each person's films in order of time, split by leaving one out: the last film tests, the one
before validates."""

from dataclasses import dataclass

import numpy as np

from lightning_distrec.errors import DataError
from recipes.movielens.folder import Ratings

MIN_FILMS = 3
"""A person with fewer has nothing to train, validate and test with, and is left out of validation
and test."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """All interactions, person after person, each person's in order of time."""

    users: np.ndarray
    """(num_events,) int64, from 0, ascending."""
    items: np.ndarray
    """(num_events,) int64, from 1; 0 is kept for "none"."""
    times: np.ndarray
    """(num_events,) int64, in seconds."""
    starts: np.ndarray
    """(num_events,) int64: where the person's first event is."""
    parts: dict[str, np.ndarray]
    """"train", "val" and "test": the positions of their events."""

    def histories(self, events: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the films just before each event, and how many there are.

        The first is (len(events), length) int64: the oldest first, 0 where there are fewer; the
        second (len(events),).
        """
        places = events[:, None] + np.arange(-length, 0)
        is_filled = places >= self.starts[events][:, None]
        return np.where(is_filled, self.items[np.maximum(places, 0)], 0), is_filled.sum(1)


def leave_one_out(ratings: Ratings) -> Sequences:
    """Order and split the interactions. Raises DataError: no person has three."""
    order = np.lexsort((ratings.times, ratings.users))
    users, items = ratings.users[order], 1 + ratings.items[order]
    _, firsts, counts = np.unique(users, return_index=True, return_counts=True)
    enough = counts >= MIN_FILMS
    if not enough.any():
        raise DataError(
            f"{len(users)} interactions: nobody has {MIN_FILMS} or more, so none can be left out."
        )
    lasts = (firsts + counts - 1)[enough]
    held_out = np.concatenate([lasts, lasts - 1])
    return Sequences(
        users=users,
        items=items,
        times=ratings.times[order].astype(np.int64),
        starts=np.repeat(firsts, counts),
        parts={
            "train": np.setdiff1d(np.arange(len(users)), held_out),
            "val": lasts - 1,
            "test": lasts,
        },
    )
