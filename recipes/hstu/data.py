"""The batches: a person's latest films with their times, sequence after sequence without filling,
and what follows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recipes.sasrec.data import SequenceDataModule, Windows


class JaggedWindows(Windows):
    """Windows that take only as much room as they have films."""

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of these windows, as SASRec's but for the shape; `places` is the sum of
        the lengths.

        items, following: (places,) int64, the films of a window after those of the one before, and
        the film after each. time, following_time: (places,) int64, in seconds: when they were
        rated.
        length: (batch_size,) int64, films in each window, at least 1.
        """
        ends = self.ends[np.asarray(numbers)]
        lengths = np.minimum(ends - self.sequences.starts[ends], self.length)
        # A person's events lie one after the other: the place before `stops` is the event before
        # `ends`.
        stops = lengths.cumsum()
        events = np.arange(stops[-1]) + np.repeat(ends - stops, lengths)
        return {
            "items": torch.from_numpy(self.sequences.items[events]),
            "following": torch.from_numpy(self.sequences.items[events + 1]),
            "time": torch.from_numpy(self.sequences.times[events]),
            "following_time": torch.from_numpy(self.sequences.times[events + 1]),
            "length": torch.from_numpy(lengths),
        }


class JaggedSequenceDataModule(SequenceDataModule):
    """The same people, films and split as SASRec's, in jagged batches."""

    windows = JaggedWindows
