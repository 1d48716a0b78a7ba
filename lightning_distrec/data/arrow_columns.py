"""Reads columns of Arrow as raw values for the encoder, and what is fitted on them; whole columns
at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from lightning_distrec.data.features import Bucketize, Feature, Number, Vocabulary
from lightning_distrec.data.raw_values import Cells, Texts, check_finite, seconds_of, transformed
from lightning_distrec.errors import DataError

MAX_SAMPLE = 2**20
"""Quantiles are exact up to this number of values; of more, every second one is dropped again and
again."""


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Raise errors of files and values as DataErrors that begin with `place`."""
    try:
        yield
    except (DataError, pa.ArrowException, OSError, LookupError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{place}{lines[0]}") from error


def type_problem(kind: pa.DataType, feature: Feature) -> str | None:
    """Return why a feature cannot read a column of this type; None: it can."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_sequence = _is_list(kind)
    if is_sequence and _is_list(kind.value_type):
        return "it has lists of lists; write one list for each row"
    if feature.max_length is None and is_sequence:
        return "sequences need max_length"
    if feature.max_length is not None and not is_sequence and not (is_text and feature.separator):
        return "max_length is for lists, or for texts with a separator"
    value = _value_type(kind)
    if feature.is_time and (_is_text(value) or types.is_timestamp(value) or types.is_date(value)):
        return None
    if feature.is_numeric and not is_number(value) and not (is_text and feature.separator):
        return f"{feature.kind} needs numbers; use time or age for times"
    if not feature.is_numeric and not (
        _is_text(value) or types.is_integer(value) or types.is_boolean(value)
    ):
        return (
            f"{feature.kind} needs texts, integers or booleans; use bucketize for other numbers, "
            "time for times"
        )
    return None


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column of this type can be a number; a column without any value can."""
    checks = (
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_decimal,
        types.is_null,
    )
    return any(check(kind) for check in checks)


def rounded_types(schema: pa.Schema) -> dict[str, str]:
    """Return numpy's type of each column of floating-point numbers, which may have fewer bits than
    float64."""
    kinds = {field.name: _value_type(field.type) for field in schema}
    kinds_by_column = {}
    for column, kind in kinds.items():
        if types.is_floating(kind):
            kinds_by_column[column] = kind.to_pandas_dtype().__name__
    return kinds_by_column


def _value_type(kind: pa.DataType) -> pa.DataType:
    return _value_type(kind.value_type) if _is_list(kind) or types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_null(kind)
        or types.is_string_view(kind)
    )


def flat_values(column: Any, feature: Feature) -> tuple[pa.Array, np.ndarray | None]:
    """Return the values of a column, those of sequences one after the other, and the sequences'
    lengths."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # more text than 32-bit offsets can address
        array = pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in array.chunks])
    if feature.max_length is None:
        return array, None
    if types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if types.is_null(array.type):
        array = array.cast(pa.list_(pa.null()))
    if feature.separator is not None and _is_text(array.type):
        # An empty text is an empty sequence, not one of an empty text.
        array = compute.split_pattern(
            compute.if_else(compute.equal(array, ""), None, array), feature.separator
        )
    lengths = compute.fill_null(compute.list_value_length(array), 0)
    return compute.list_flatten(array), lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def cells_of(column: Any, feature: Feature) -> Cells:
    """Return a column as the encoder reads it. Raises pyarrow.ArrowInvalid: a value is of another
    type."""
    values, lengths = flat_values(column, feature)
    return Cells(_numbers_for(values, feature) if feature.is_numeric else texts_of(values), lengths)


def _numbers_for(values: pa.Array, feature: Feature) -> np.ndarray:
    return seconds_from(values) if feature.is_time else numbers_of(values)


def seconds_from(values: pa.Array) -> np.ndarray:
    """Return times as seconds since 1970, (N,) float64; what is missing is NaN."""
    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if types.is_timestamp(values.type) or types.is_date(values.type):
        # Texts have microseconds, too: what is finer is dropped here as there.
        kind = pa.timestamp("us", tz=getattr(values.type, "tz", None))
        microseconds = values.cast(kind, safe=False).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return np.divide(microseconds, 1e6)
    if not _is_text(values.type) or types.is_null(values.type):
        return numbers_of(values)
    return np.array(
        [np.nan if text is None else seconds_of(text) for text in values.to_pylist()],
        dtype=np.float64,
    )


def numbers_of(values: pa.Array) -> np.ndarray:
    """Return (N,) float64; what is missing is NaN. Raises ValueError: an integer has no float64."""
    try:
        numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        if not types.is_integer(values.type):
            raise
        raise ValueError(
            f"{error}; use hash or vocabulary for ids, or write numbers as float64"
        ) from error
    return numbers.astype(np.float64, copy=False)


def texts_of(values: pa.Array) -> Texts:
    """Return texts, integers or booleans as the encoder reads them."""
    if types.is_dictionary(values.type):
        texts = texts_of(values.dictionary)
        codes = compute.fill_null(values.indices.cast(pa.int64()), -1).to_numpy(
            zero_copy_only=False
        )
        return texts._replace(codes=codes)
    is_null = compute.is_null(values).to_numpy(zero_copy_only=False) if values.null_count else None
    if not types.is_string(values.type) and not types.is_large_string(values.type):
        values = values.cast(pa.string())
    kind = np.int64 if types.is_large_string(values.type) else np.int32
    _, ends, data = values.buffers()
    offsets = (
        np.frombuffer(ends, kind)[values.offset :][: len(values) + 1] if ends else np.zeros(1, kind)
    )
    return Texts(np.frombuffer(data or b"", np.uint8), offsets[:-1], offsets[1:], is_null)


def statistics_for(feature: Feature) -> "ValueCounts | Numbers | None":
    """Return what takes a feature's vocabulary, quantiles or moments from values; None: it needs
    none."""
    if isinstance(feature, Vocabulary):
        return ValueCounts()
    is_fitted = (
        isinstance(feature, Bucketize)
        and feature.quantiles
        or isinstance(feature, Number)
        and feature.standardize
    )
    return Numbers(feature) if is_fitted else None


class ValueCounts:
    """How often each value occurs, as text."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []

    def add(self, values: pa.Array) -> None:
        """Count these values, all but the missing ones."""
        counted = compute.value_counts(values)
        counts = pa.table({"value": counted.field(0).cast(pa.string()), "count": counted.field(1)})
        self._parts.append(counts.drop_null())  # a dictionary may have a missing value, too
        if len(self._parts) >= 64:
            self._parts = [self._merged()]

    def _merged(self) -> pa.Table:
        merged = pa.concat_tables(self._parts).group_by("value").aggregate([("count", "sum")])
        return merged.rename_columns(["value", "count"])

    def top_values(self, size: int, min_count: int) -> list[str]:
        """Return values by falling count; of equal counts, by their letters."""
        merged = self._merged()
        merged = merged.filter(compute.greater_equal(merged["count"], min_count))
        ordered = merged.sort_by([("count", "descending"), ("value", "ascending")])
        values: list[str] = ordered["value"].slice(0, size).to_pylist()
        return values


class Numbers:
    """Mean and standard deviation of numbers, or of their logarithms, and a sample of them for
    quantiles."""

    def __init__(self, feature: Feature) -> None:
        self._feature = feature
        self._plain = feature.plain("")
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._sample = np.zeros(0)
        self._step = 1
        self._place = 0

    def add(self, values: pa.Array) -> None:
        """Add numbers, all but the missing ones."""
        originals = _numbers_for(values, self._feature)
        numbers = transformed(originals, self._plain)
        with np.errstate(over="ignore"):
            check_finite(numbers.astype(np.float32), originals)
        numbers = numbers[~np.isnan(numbers)]
        if not len(numbers):
            return
        # Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
        # variances, 1979.
        count = self._count + len(numbers)
        mean = float(numbers.mean())
        difference = mean - self._mean
        self._squares += (
            float(((numbers - mean) ** 2).sum())
            + difference**2 * self._count * len(numbers) / count
        )
        self._mean += difference * len(numbers) / count
        self._count = count
        self._sample = np.concatenate([
            self._sample,
            numbers[-self._place % self._step :: self._step],
        ])
        self._place += len(numbers)
        while len(self._sample) > MAX_SAMPLE:
            self._sample = self._sample[::2]
            self._step = 2 * self._step

    def moments(self) -> list[float]:
        """Return mean and standard deviation; 0 and 1 where there is nothing to divide by."""
        deviation = float(np.sqrt(self._squares / self._count)) if self._count else 0.0
        return [self._mean, deviation or 1.0]

    def quantiles(self, count: int) -> list[float]:
        """Return the boundaries of `count` buckets; fewer where a value fills several."""
        if not len(self._sample):
            return []
        return list(map(float, np.unique(np.quantile(self._sample, np.arange(1, count) / count))))
