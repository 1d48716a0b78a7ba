"""What the model sees of an interaction: its features and tables, and how the past is counted
without looking ahead."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lightning_distrec.data import Bucketize, Columns, Number, Vocabulary
from lightning_distrec.data.features import Feature
from recipes.movielens.columns import AGE_EDGES, YEAR_EDGES

DENSE = ("user_events", "user_like_rate", "item_events", "item_like_rate")
"""Columns of the dense numbers. All count strictly earlier events only."""

# The sizes are fixed, with room to spare, so that a checkpoint fits another folder too. Unused rows
# cost memory only.
FEATURES: dict[str, Feature] = {
    "user": Vocabulary(rows=16384),
    "item": Vocabulary(rows=8192),
    "recent_likes": Vocabulary(rows=8192, table="item", max_length=20),
    "recent_dislikes": Vocabulary(rows=8192, table="item", max_length=20),
    "age": Bucketize(boundaries=AGE_EDGES),
    "gender": Vocabulary(rows=8),
    "occupation": Vocabulary(rows=64),
    "zip": Vocabulary(rows=64),
    "year": Bucketize(boundaries=YEAR_EDGES),
    "genres": Vocabulary(rows=64, table="genre", max_length=32, separator=" "),
    **{name: Number() for name in DENSE},
}

TABLES = Columns(FEATURES).tables
VECTORS = tuple(feature for table in TABLES.values() for feature in table.features)
"""The features that are looked up in a table."""

# A rate over n earlier events is (likes + 5 * 0.5) / (n + 5): half, until there is something to go
# by. The 0.5 is written down here rather than measured, so that it cannot carry anything from the
# future.
PRIOR_EVENTS = 5.0
PRIOR_RATE = 0.5
# People rate dozens of films in their first sitting. A model trained yesterday cannot know who came
# today, so an event uses its user's own row only when the user first came more than this long ago,
# and the row "unknown" before.
NEW_USER_SECONDS = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Past:
    """What was known of a user or an item just before each event."""

    events: np.ndarray
    """(num_events,) int64: events with a strictly earlier time."""
    likes: np.ndarray
    """(num_events,) int64: how many of those were likes."""

    def dense_columns(self) -> list[np.ndarray]:
        """Return log(1 + events) and the smoothed like-rate, each (num_events,), roughly between -1
        and 2."""
        rate = (self.likes + PRIOR_EVENTS * PRIOR_RATE) / (self.events + PRIOR_EVENTS)
        return [0.25 * np.log1p(self.events), 4.0 * (rate - PRIOR_RATE)]


def count_past(groups: np.ndarray, times: np.ndarray, likes: np.ndarray) -> Past:
    """Count, for each event, the events and likes of the same group at strictly earlier times.

    groups, times, likes: (num_events,), in order of time; likes are 0 or 1. Events at the same time
    as this one do not count, in whatever order they are listed.
    """
    order = np.lexsort((times, groups))
    group, time = groups[order], times[order]
    index = np.arange(len(order))
    # Where the run of equal (group, time) and the run of equal group began that this event belongs
    # to.
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
    users: np.ndarray, items: pa.Array, eligible: np.ndarray, num_earlier: np.ndarray, length: int
) -> pa.Array:
    """Return, for each event, a list of the last `length` chosen items of its user before it.

    users, items: (num_events,), in order of time. eligible: (num_events,), 1 for the events to pick
    from (the likes, say). num_earlier: (num_events,), how many chosen events of the user have a
    strictly earlier time; it keeps out what happened at the same time.
    """
    picked = np.flatnonzero(eligible)
    picked = picked[np.argsort(users[picked], kind="stable")]
    lengths = np.minimum(num_earlier, length)
    ends = lengths.cumsum()
    # A user's chosen events lie one after the other; those of an event end with its last earlier
    # one.
    stops = np.searchsorted(users[picked], users) + num_earlier
    events = picked[np.arange(ends[-1] if len(ends) else 0) + np.repeat(stops - ends, lengths)]
    return pa.ListArray.from_arrays(
        np.concatenate([[0], ends]).astype(np.int32), items.take(pa.array(events))
    )


def is_old_user(users: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return whether each event's user first came more than a day earlier; (num_events,), in order
    of time."""
    _, first_event, position = np.unique(users, return_index=True, return_inverse=True)
    return times - times[first_event][position] > NEW_USER_SECONDS
