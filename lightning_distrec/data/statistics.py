"""What is fitted on columns: counts of values, moments and quantiles.

Row groups are counted apart and merged. The result is the same to the bit, however they are shared
out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import compute

from lightning_distrec.data.arrow_columns import (
    column_in,
    errors_at,
    flat_values,
    numbers_for,
    texts_of,
)
from lightning_distrec.data.features import Bucketize, Feature, Number, Vocabulary
from lightning_distrec.data.raw_values import check_finite, hash_texts, mix, transformed

MAX_SAMPLE = 2**20
"""Quantiles are exact up to this number of values.

Of more, this many are drawn. The share of values below a boundary is then off by 0.27 % at most,
but for one case in a million (Massart: The tight constant in the Dvoretzky-Kiefer-Wolfowitz
inequality, 1990).
"""
KEPT_PARTS = 64
"""Counts of row groups that wait until they are added up."""


Key = tuple[str, str]
"""Kind, and table or the name of a feature without one."""


class Statistic(Protocol):
    """What is taken from the training data for a table, or for a feature without one."""

    columns: dict[str, Feature]
    """The columns that are counted, and the features that read them."""

    def add(self, table: pa.Table, number: int) -> None:
        """Count the values of the data's `number`-th table. Raises DataError with the column."""

    def merge(self, others: Sequence[Any]) -> None:
        """Add the counts of the tables that follow."""

    def result(self) -> list[Any]:
        """Return what the fitted mapping has of it, as JSON has it."""


def statistic_for(feature: Feature) -> Statistic | None:
    """Return what counts the values of a feature; None: it takes nothing from the data."""
    if isinstance(feature, Vocabulary) and feature.file is None:
        return ValueCounts(feature)
    if isinstance(feature, Bucketize) and feature.quantiles is not None:
        return Quantiles(feature.quantiles)
    if isinstance(feature, Number) and feature.standardize and feature.moments is None:
        return Moments()
    return None


class ValueCounts:
    """How often each value occurs, as text. Two values with the same hash are one, as in the
    encoder."""

    def __init__(self, feature: Vocabulary) -> None:
        self.columns: dict[str, Feature] = {}
        self.size = feature.rows - 1
        self.min_count = feature.min_count
        self.parts: list[pa.Table] = []
        """Values, their counts and hashes. In each part a value is once, by rising hash."""

    def add(self, table: pa.Table, number: int) -> None:
        """Count all values but the missing ones. Raises DataError with the column."""
        for column, feature in self.columns.items():
            with errors_at(f"column '{column}': "):
                values, _ = flat_values(column_in(table, column, feature), feature)
                counted = compute.value_counts(values)
                self.add_counts(counted.field(0), counted.field(1))
        if len(self.parts) > KEPT_PARTS:
            self.counts()

    def add_counts(self, values: Any, counts: Any) -> None:
        """Add values that were counted elsewhere: texts, integers or booleans, and integers, (N,)
        each."""
        texts = values.cast(pa.large_string())
        part = pa.table({"value": texts, "count": counts}).drop_null()
        texts = part["value"].combine_chunks()
        hashes = hash_texts(texts_of(texts))
        part = part.append_column("hash", pa.array(hashes))
        self.parts.append(_added_up([part]))

    def merge(self, others: "Sequence[ValueCounts]") -> None:
        """Add the counts of others."""
        for other in others:
            self.parts += other.parts
        self.counts()

    def counts(self) -> pa.Table:
        """Return all values, as a part."""
        if len(self.parts) > 1:
            self.parts = [_added_up(self.parts)]
        return self.parts[0]

    def __len__(self) -> int:
        return self.counts().num_rows

    def __sizeof__(self) -> int:
        # Dask goes by it when it keeps results on disk.
        return sum(part.nbytes for part in self.parts)

    def split(self, num_shares: int) -> "list[ValueCounts]":
        """Return the counts of shares of the values: ranges of their hashes."""
        counts = self.counts()
        width = np.uint64(2**64 // num_shares)
        share_of_value = np.minimum(counts["hash"].to_numpy() // width, num_shares - 1)
        shares = []
        for number in range(num_shares):
            share = copy(self)
            # Rows that are taken, and no slice: what is sent must not hold the other shares.
            rows = np.flatnonzero(share_of_value == number)
            share.parts = [counts.take(rows)]
            shares.append(share)
        return shares

    def frequencies(self) -> dict[int, int]:
        """Return how many values occur how often, those that occur often enough."""
        numbers, frequencies = np.unique(self.counts()["count"].to_numpy(), return_counts=True)
        pairs = zip(numbers.tolist(), frequencies.tolist(), strict=True)
        return {number: frequency for number, frequency in pairs if number >= self.min_count}

    def keep(self, limit: "Limit") -> "ValueCounts":
        """Return the counts without values that get no row."""
        counts = self.counts()
        numbers = counts["count"].to_numpy()
        is_kept = numbers > limit.frequency
        ties = np.flatnonzero(numbers == limit.frequency)
        is_kept[ties[: limit.num_ties]] = True
        kept = copy(self)
        kept.parts = [counts.take(np.flatnonzero(is_kept))]
        return kept

    def result(self) -> list[str]:
        """Return the values that get a row, by falling count, of equal counts by their letters.

        Where not all values of a count get a row, those with the lowest hashes do.
        """
        (limit,) = limits([self.frequencies()], self.size)
        counts = self.keep(limit).counts()
        ordered = counts.sort_by([("count", "descending"), ("value", "ascending")])
        values: list[str] = ordered["value"].to_pylist()
        return values


class Limit(NamedTuple):
    """Which values of a share get a row."""

    frequency: int
    """All that occur more often do."""
    num_ties: int
    """Of those that occur as often, this many do, the first ones."""


def limits(frequencies: Sequence[Mapping[int, int]], size: int) -> list[Limit]:
    """Return the limits of shares, of whose values `size` together get a row.

    frequencies: how many values of each share occur how often.
    """
    total: Counter[int] = Counter()
    for frequency in frequencies:
        total.update(frequency)
    free = size
    limit = 0
    for count in sorted(total, reverse=True):
        if total[count] > free:
            limit = count
            break
        free -= total[count]
    else:
        limit = min(total, default=1) - 1
    limits = []
    for frequency in frequencies:
        num_ties = min(free, frequency.get(limit, 0))
        free -= num_ties
        limits.append(Limit(limit, num_ties))
    return limits


def _added_up(parts: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables(parts).combine_chunks()
    if not table.num_rows:
        return table
    hashes = table["hash"].to_numpy()
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    is_first = np.append(True, hashes[1:] != hashes[:-1])
    first = np.flatnonzero(is_first)
    counts = table["count"].to_numpy()[order]
    counts = np.add.reduceat(counts, first)
    values = table["value"].take(order[first])
    return pa.table({"value": values, "count": counts, "hash": hashes[first]})


class Moments:
    """Mean and standard deviation of numbers, or of their logarithms."""

    def __init__(self) -> None:
        self.columns: dict[str, Feature] = {}
        self.tables: list[tuple[int, float, float]] = []
        """Numbers of each table, their mean, and the sum of their squared differences from it."""

    def add(self, table: pa.Table, number: int) -> None:
        """Add all numbers but the missing ones. Raises DataError with the column."""
        for column, feature in self.columns.items():
            numbers = _fitted_numbers(table, column, feature)
            numbers = numbers[~np.isnan(numbers)]
            if not len(numbers):
                continue
            # From the first one: the mean of equal numbers is theirs to the bit, and they deviate
            # by 0.
            differences = numbers - numbers[0]
            mean = differences.mean()
            squares = (differences - mean) ** 2
            self.tables.append((len(numbers), float(numbers[0] + mean), float(squares.sum())))

    def merge(self, others: "Sequence[Moments]") -> None:
        """Add the numbers of the tables that follow."""
        for other in others:
            self.tables += other.tables

    def result(self) -> list[float]:
        """Return mean and standard deviation; 0 and 1 where there is nothing to divide by."""
        # Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
        # variances, 1979. Table by table in their order: sums in another one have other bits.
        count = 0
        mean = squares = 0.0
        for more, mean_of_more, squares_of_more in self.tables:
            total = count + more
            difference = mean_of_more - mean
            squares += squares_of_more
            squares += difference**2 * count * more / total
            mean += difference * more / total
            count = total
        deviation = float(np.sqrt(squares / count)) if count else 0.0
        return [mean, deviation or 1.0]


class Quantiles:
    """A sample of numbers, all of them up to `MAX_SAMPLE`."""

    def __init__(self, num_buckets: int) -> None:
        self.columns: dict[str, Feature] = {}
        self.num_buckets = num_buckets
        self.sample = np.zeros(0)
        self.order = np.zeros(0, dtype=np.uint64)
        """A random number for each value; those with the lowest are kept."""

    def add(self, table: pa.Table, number: int) -> None:
        """Add all numbers but the missing ones. Raises DataError with the column."""
        for place, (column, feature) in enumerate(self.columns.items()):
            numbers = _fitted_numbers(table, column, feature)
            rows = np.flatnonzero(~np.isnan(numbers))
            # By the place in the data, so that a value is drawn wherever it is counted.
            first = np.uint64(number * len(self.columns) + place << 32)
            drawn = mix(rows.astype(np.uint64) + first)
            self._keep([self.sample, numbers[rows]], [self.order, drawn])

    def merge(self, others: "Sequence[Quantiles]") -> None:
        """Add the samples of others."""
        parts = [self, *others]
        self._keep([part.sample for part in parts], [part.order for part in parts])

    def _keep(self, samples: list[np.ndarray], orders: list[np.ndarray]) -> None:
        self.sample = np.concatenate(samples)
        self.order = np.concatenate(orders)
        if len(self.sample) > MAX_SAMPLE:
            lowest = np.argpartition(self.order, MAX_SAMPLE)[:MAX_SAMPLE]
            self.sample = self.sample[lowest]
            self.order = self.order[lowest]

    def result(self) -> list[float]:
        """Return the boundaries of buckets; fewer where a value fills several."""
        if not len(self.sample):
            return []
        shares = np.arange(1, self.num_buckets) / self.num_buckets
        boundaries = np.quantile(self.sample, shares)
        different: list[float] = np.unique(boundaries).tolist()
        return different


def _fitted_numbers(table: pa.Table, column: str, feature: Feature) -> np.ndarray:
    """Return a column's numbers as they are fitted, (N,) float64; what is missing is NaN."""
    with errors_at(f"column '{column}': "), np.errstate(over="ignore"):
        values, _ = flat_values(column_in(table, column, feature), feature)
        originals = numbers_for(values, feature)
        numbers = transformed(originals, feature.plain(""))
        check_finite(numbers.astype(np.float32), originals)
    return numbers
