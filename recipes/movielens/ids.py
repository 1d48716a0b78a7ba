"""Turns the texts of a MovieLens folder into ids and bags of ids. Id 0 is kept for "unknown or missing"."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_distrec.errors import DataError

AGE_EDGES = (18, 25, 30, 35, 40, 45, 50, 56, 65)
YEAR_EDGES = (1940, 1950, 1960, 1970, 1975, 1980, 1985, 1988, *range(1990, 2021))


@dataclass(frozen=True, kw_only=True)
class Bags:
    """Any number of ids for each of N rows, as views into one array; rows may overlap."""

    values: Tensor
    """(num_values,) int64."""
    starts: Tensor
    """(N,) int64: where a row begins in `values`."""
    lengths: Tensor
    """(N,) int64: how many ids a row has; may be 0."""

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of `rows` one after the other, (sum of lengths,), and the lengths, (len(rows),)."""
        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        # Position k of the result belongs to some row; `shift` leads from k to its place in `values`.
        shift = torch.repeat_interleave(self.starts[rows] - (ends - lengths), lengths)
        return self.values[torch.arange(len(shift)) + shift], lengths

    def select(self, rows: Tensor) -> "Bags":
        """Return the bags of `rows`, which may repeat; the ids are shared, not copied."""
        return Bags(values=self.values, starts=self.starts[rows], lengths=self.lengths[rows])


def ids_of_texts(texts: Iterable[str], rows: int, kind: str) -> np.ndarray:
    """Number the different texts from 1, in order of appearance; an empty text is 0.

    Raises DataError: more different texts than the table has rows.
    """
    numbers = {"": 0}
    ids = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    check_fits(len(numbers) - 1, rows, kind)
    return ids


def ids_of_numbers(texts: list[str], edges: tuple[int, ...]) -> np.ndarray:
    """Return 1 + the bucket of each number between `edges`; what is no whole number is 0 (unknown)."""
    return np.array([1 + np.searchsorted(edges, int(text), side="right") if text.isdecimal() else 0 for text in texts])


def bags_of_words(texts: list[str], rows: int, kind: str) -> Bags:
    """Number the different words of all texts from 1; each text becomes the bag of its words' ids.

    Raises DataError: more different words than the table has rows.
    """
    words = [text.split() for text in texts]
    lengths = torch.tensor([len(bag) for bag in words])
    values = torch.from_numpy(ids_of_texts([word for bag in words for word in bag], rows, kind))
    return Bags(values=values, starts=lengths.cumsum(0) - lengths, lengths=lengths)


def check_fits(count: int, rows: int, kind: str) -> None:
    """Raise DataError if `count` ids and the reserved id 0 need more than `rows` rows."""
    if count + 1 > rows:
        raise DataError(
            f"{kind}: {count} different values do not fit a table of {rows} rows (one is reserved for unknown). "
            "Raise its rows in TABLES of the recipe's features.py."
        )
