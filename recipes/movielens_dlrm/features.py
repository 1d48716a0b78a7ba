"""What the model sees of an interaction: names, table sizes, and how the past is counted without looking ahead.

An id is 1 + the position of a value in its vocabulary; id 0 is kept for "unknown or missing".
"""

from dataclasses import dataclass

import numpy as np
import torch

from recipes.movielens.ids import Bags


@dataclass(frozen=True, kw_only=True)
class Table:
    """An embedding table and the features that are looked up in it."""

    rows: int
    features: tuple[str, ...]


# The sizes are fixed, with room to spare, so that model and data agree without exchanging anything, and a
# checkpoint fits another folder too. An unused row costs memory only. A folder that needs more gets an error.
TABLES = {
    "user": Table(rows=16384, features=("user",)),
    "item": Table(rows=8192, features=("item", "recent_likes", "recent_dislikes")),
    "age": Table(rows=16, features=("age",)),
    "gender": Table(rows=8, features=("gender",)),
    "occupation": Table(rows=64, features=("occupation",)),
    "zip": Table(rows=64, features=("zip",)),
    "year": Table(rows=32, features=("year",)),
    "genre": Table(rows=64, features=("genres",)),
}

FEATURES = tuple(feature for table in TABLES.values() for feature in table.features)
"""Order of the features in a batch's ids."""

DENSE = ("user_events", "user_like_rate", "item_events", "item_like_rate")
"""Order of the columns in a batch's dense numbers. All count strictly earlier events only."""

# A rate over n earlier events is (likes + 5 * 0.5) / (n + 5): half, until there is something to go by. The 0.5 is
# written down here rather than measured, so that it cannot carry anything from the future.
PRIOR_EVENTS = 5.0
PRIOR_RATE = 0.5
# People rate dozens of films in their first sitting. A model trained yesterday cannot know who came today, so an
# event uses its user's own row only when the user first came more than this long ago, and the row "unknown" before.
NEW_USER_SECONDS = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Past:
    """What was known of a user or an item just before each event."""

    events: np.ndarray
    """(num_events,) int64: events with a strictly earlier time."""
    likes: np.ndarray
    """(num_events,) int64: how many of those were likes."""

    def dense_columns(self) -> list[np.ndarray]:
        """Return log(1 + events) and the smoothed like-rate, each (num_events,), roughly between -1 and 2."""
        rate = (self.likes + PRIOR_EVENTS * PRIOR_RATE) / (self.events + PRIOR_EVENTS)
        return [0.25 * np.log1p(self.events), 4.0 * (rate - PRIOR_RATE)]


def count_past(groups: np.ndarray, times: np.ndarray, likes: np.ndarray) -> Past:
    """Count, for each event, the events and likes of the same group at strictly earlier times.

    groups, times, likes: (num_events,), in order of time; likes are 0 or 1. Events at the same time as this one
    do not count, in whatever order they are listed.
    """
    order = np.lexsort((times, groups))
    group, time = groups[order], times[order]
    index = np.arange(len(order))
    # Where the run of equal (group, time) and the run of equal group began that this event belongs to.
    new_group = np.diff(group, prepend=group[:1] - 1) != 0
    new_time = new_group | (np.diff(time, prepend=time[:1] - 1) != 0)
    group_start = np.maximum.accumulate(np.where(new_group, index, 0))
    time_start = np.maximum.accumulate(np.where(new_time, index, 0))
    likes_before = np.concatenate(([0], np.cumsum(likes[order])))
    events_of = np.empty(len(order), dtype=np.int64)
    likes_of = np.empty(len(order), dtype=np.int64)
    events_of[order] = time_start - group_start
    likes_of[order] = likes_before[time_start] - likes_before[group_start]
    return Past(events=events_of, likes=likes_of)


def latest_items(
    users: np.ndarray, item_ids: np.ndarray, eligible: np.ndarray, num_earlier: np.ndarray, length: int
) -> Bags:
    """Return, for each event, the ids of the last `length` chosen items of its user before it.

    users, item_ids: (num_events,), in order of time. eligible: (num_events,), 1 for the events to pick from (the
    likes, say). num_earlier: (num_events,), how many chosen events of the user have a strictly earlier time; it keeps
    out what happened at the same time.
    """
    picked = np.flatnonzero(eligible)
    picked = picked[np.argsort(users[picked], kind="stable")]
    first_of_user = np.searchsorted(users[picked], users)
    lengths = np.minimum(num_earlier, length)
    return Bags(
        values=torch.from_numpy(item_ids[picked]),
        starts=torch.from_numpy(first_of_user + num_earlier - lengths),
        lengths=torch.from_numpy(lengths),
    )


def ids_of_known_users(users: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return 1 + user where the user first came more than a day earlier, else 0; (num_events,), in order of time."""
    _, first_event, position = np.unique(users, return_index=True, return_inverse=True)
    is_seen = times - times[first_event][position] > NEW_USER_SECONDS
    return np.where(is_seen, 1 + users, 0)
