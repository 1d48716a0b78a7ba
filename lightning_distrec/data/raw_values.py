"""Turns raw values into ids and numbers, by numpy alone: in training, and in served folders, which
get this file.

Texts are hashed as UTF-8: their length, then words of 8 bytes, filled up with zeros, one at least,
each mixed in by the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
Number Generators, OOPSLA 2014). Integers are hashed as their decimals, so that 42 and "42" are one
value; booleans as "true" and "false".
"""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

UNKNOWN = 0
"""The row of values that are missing, or not in a vocabulary."""
WORD = 8
BLOCK = 8192
MAX_TEXT_BYTES = 2**15
"""A longer text is an error: all other rows wait while its words are hashed one by one."""
NUMBER = re.compile("[-+.0-9A-Za-z]+")
"""What Arrow reads as a number, of what Python does."""
DENSE_KINDS = ("number", "age", "vector")
TIME_KINDS = ("time", "age")
NUMERIC_KINDS = ("number", "age", "vector", "time", "bucketize")
TIME_PARTS = {"hour": 24, "weekday": 7, "day": 31, "month": 12}
"""Part of a time -> how many values it has."""
MAX_SECONDS = 2.6e11
"""Of 8,000 years; a larger number is a time in other units."""
AGE_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400}
"""Unit of an age -> its seconds."""
MASKS = np.array([(1 << 8 * size) - 1 for size in range(WORD + 1)], dtype=np.uint64)


class Texts(NamedTuple):
    """Texts as bytes in one array, one text after the other."""

    data: np.ndarray
    """(num_bytes,) uint8."""
    starts: np.ndarray
    """(num_texts,) int32 or int64: first byte of each."""
    ends: np.ndarray
    """(num_texts,): the byte after its last one."""
    is_null: np.ndarray | None
    """(num_texts,) bool; None: no text is missing."""
    codes: np.ndarray | None = None
    """(num_values,) int64: which text each value is, -1 where it is missing; None: values are
    texts, in order."""


class Cells(NamedTuple):
    """A column. N values of `num_rows` rows: one for each, or sequences one after the other."""

    values: Any
    """Texts, or (N,) float64 with NaN for what is missing."""
    lengths: np.ndarray | None
    """(num_rows,) int64, of sequences; None: one value for each row."""


class Encoded(NamedTuple):
    """A feature of rows: numbers (float32), or ids, of 32 bits until they are in a batch."""

    values: np.ndarray
    """One for each row, or sequences one after the other."""
    offsets: np.ndarray | None
    """(num_rows + 1,) int64: where sequences begin and end; None: one value for each row."""

    def lengths(self) -> np.ndarray:
        """Return the length of each sequence."""
        assert self.offsets is not None, "a row has one value"
        return np.diff(self.offsets)


def places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices of runs, one run after the other."""
    ends = np.cumsum(lengths)
    indices = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return where runs begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def pack(texts: Sequence[Any]) -> Texts:
    """Return texts, integers, booleans and None as Texts. Raises ValueError: another type."""
    lines = list(map(_bytes, texts))
    offsets = offsets_of(np.array(list(map(len, lines)), dtype=np.int64))
    is_null = np.array([text is None for text in texts], dtype=bool)
    return Texts(np.frombuffer(b"".join(lines), dtype=np.uint8), offsets[:-1], offsets[1:], is_null)


def _bytes(text: Any) -> bytes:
    if isinstance(text, bool):
        return b"true" if text else b"false"
    if text is not None and not isinstance(text, (str, int)):
        raise ValueError(f"{text!r} is neither a text nor an integer")
    return b"" if text is None else str(text).encode()


def mix(words: np.ndarray) -> np.ndarray:
    """Return 64 bits in which each depends on all 64 of the input, (N,) uint64."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def hash_texts(texts: Texts, seed: int = 0) -> np.ndarray:
    """Return 64 bits for each text, (num_texts,) uint64."""
    start = mix(np.array([seed * 0x9E3779B97F4A7C15 & (1 << 64) - 1], dtype=np.uint64))
    # In blocks whose arrays fit into a processor's cache.
    hashes = np.empty(len(texts.starts), dtype=np.uint64)
    for first in range(0, len(hashes), BLOCK):
        block = slice(first, first + BLOCK)
        hashes[block] = _hash_block(texts, block, start)
    return hashes


def _hash_block(texts: Texts, block: slice, start: np.ndarray) -> np.ndarray:
    starts = texts.starts[block]
    ends = texts.ends[block]
    data = texts.data[starts[0] : ends[-1]]
    # As words, with zeros after the last text.
    words = np.zeros(len(data) // WORD + 2, dtype="<u8")
    words.view(np.uint8)[: len(data)] = data
    starts, lengths = starts - starts[0], ends - starts
    hashes = start ^ lengths.astype(np.uint64)
    longest = int(lengths.max())
    if longest > MAX_TEXT_BYTES:
        raise ValueError(f"a text has {longest} bytes, and the most is {MAX_TEXT_BYTES}")
    for done in range(0, max(1, longest), WORD):
        # Every text has a first word, an empty one a zero.
        rows: Any = np.flatnonzero(lengths > done) if done else slice(None)
        first = starts[rows] + done
        remaining = lengths[rows] - done
        odd_bytes = first & (WORD - 1)
        first = first >> 3
        word = words[first]
        if odd_bytes.any():
            shift = (odd_bytes << 3).astype(np.uint64)
            word >>= shift
            # Two steps for the upper part: a shift by 64 bits is undefined.
            word |= words[first + 1] << np.uint64(1) << (np.uint64(63) - shift)
        if remaining.min() < WORD:
            word &= MASKS[np.minimum(remaining, WORD)]
        hashes[rows] = mix(hashes[rows] ^ word)
    return hashes


def rows_of(hashes: np.ndarray, num_rows: int) -> np.ndarray:
    """Turn hashes into rows 1 to num_rows - 1, in their memory: their upper 32 bits, scaled."""
    hashes >>= np.uint64(32)
    hashes *= np.uint64(num_rows - 1)
    hashes >>= np.uint64(32)
    hashes += np.uint64(1)
    return hashes.view(np.int64)


class Encoder:
    """The mapping from columns to features. plain: as `Columns.to_plain` returns it."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self.plain = plain
        self.features: dict[str, dict[str, Any]] = {**plain["features"], **plain["weights"]}
        self.groups: dict[str, list[str]] = {}
        """The features with ids, by the KeyedJaggedTensor that they are in."""
        for name, feature in self.features.items():
            if feature["kind"] not in DENSE_KINDS:
                self.groups.setdefault(feature["group"] or "ids", []).append(name)
        self._zones = {zone: np.array(changes) for zone, changes in plain["zones"].items()}
        self._vocabularies = {
            table: _Vocabulary(values) for table, values in plain["vocabularies"].items()
        }

    def encode(self, cells: dict[str, Cells]) -> dict[str, Encoded]:
        """Return the features of columns. Raises ValueError with the column."""
        encoded = {}
        for name, feature in self.features.items():
            columns = feature["columns"]
            try:
                encoded[name] = self._encode(name, [cells[column] for column in columns])
                weights = feature.get("weights")
                if weights is not None:
                    is_wrong = cells[columns[0]].lengths != cells[weights].lengths
                    _refuse_rows(is_wrong, f"not as many values as weights in '{weights}'")
            except ValueError as error:
                raise ValueError(f"column '{columns[0]}': {error}") from None
        return encoded

    def _encode(self, name: str, cells: list[Cells]) -> Encoded:
        feature = self.features[name]
        kind = feature["kind"]
        lengths = cells[0].lengths
        if feature["required"]:
            _refuse_missing(cells[0], f"and '{name}' has required=True")
        if kind == "vector":
            return Encoded(self._vectors(name, cells[0]), None)
        if kind in DENSE_KINDS:
            values = self._numbers(name, cells[0])
        elif kind == "time":
            seconds = self._rounded(feature, cells[0].values)
            values = time_part(seconds, feature["part"], self._zones[feature["zone"]])
        elif kind == "bucketize":
            numbers = self._rounded(feature, cells[0].values)
            buckets = 1 + np.searchsorted(self.plain["boundaries"][name], numbers, side="right")
            values = np.where(np.isnan(numbers), UNKNOWN, buckets)
        else:
            values = self._ids_of_texts(feature, [column.values for column in cells])
        if kind not in DENSE_KINDS:
            values = values.astype(np.uint32, copy=False)
        if lengths is None:
            return Encoded(values, None)
        latest = np.minimum(lengths, feature["max_length"])
        if (latest < lengths).any():
            values = values[places(np.cumsum(lengths) - latest, latest)]
        return Encoded(values, offsets_of(latest))

    def _rounded(self, feature: dict[str, Any], numbers: np.ndarray) -> np.ndarray:
        """Return numbers as a column of the training data's type has them, in float64."""
        kind = self.plain["rounded"].get(feature["columns"][0], "float64")
        with np.errstate(over="ignore"):
            numbers = numbers.astype(kind).astype(np.float64)
        if feature["kind"] in TIME_KINDS and (np.abs(numbers) > MAX_SECONDS).any():
            raise ValueError(
                f"{np.nanmax(np.abs(numbers)):g} is no time: write seconds since 1970, or ISO texts"
            )
        return numbers

    def _numbers(self, name: str, cells: Cells) -> np.ndarray:
        feature = self.features[name]
        numbers = transformed(self._rounded(feature, cells.values), feature)
        is_null = np.isnan(numbers)
        if feature.get("standardize"):
            mean, deviation = self.plain["moments"][name]
            numbers = (numbers - mean) / deviation
        with np.errstate(over="ignore"):
            values = numbers.astype(np.float32)
        check_finite(values, cells.values, cells.lengths)
        values[is_null] = feature["missing"]
        return values

    def _vectors(self, name: str, cells: Cells) -> np.ndarray:
        """Return vectors, (num_rows, size)."""
        feature = self.features[name]
        size = feature["size"]
        lengths: Any = cells.lengths
        is_missing = (lengths == 0) & (not feature["required"])
        _refuse_rows(~is_missing & (lengths != size), f"more or fewer numbers than size={size}")
        _refuse_missing(cells, "in a vector")
        vectors = np.full((len(lengths), size), feature["missing"], dtype=np.float32)
        vectors[~is_missing] = self._numbers(name, cells).reshape(-1, size)
        return vectors

    def _ids_of_texts(self, feature: dict[str, Any], columns: list[Texts]) -> np.ndarray:
        if feature["kind"] == "vocabulary":
            return _by_value(columns[0], self._vocabularies[feature["table"]].ids_of(columns[0]))
        seed = feature["seed"]
        num_rows = feature["rows"]
        if len(columns) == 1:
            hashes = hash_texts(columns[0], seed)
            return _by_value(columns[0], rows_of(hashes, num_rows).astype(np.uint32))
        crossed = np.uint64(0)
        is_null = np.zeros(1, dtype=bool)
        for texts in columns:
            hashes = _by_value(texts, hash_texts(texts, seed))
            crossed = mix(crossed ^ hashes)
            is_null = is_null | _is_missing(texts)
        return np.where(is_null, UNKNOWN, rows_of(crossed, num_rows))

    def arrays(self, encoded: dict[str, Encoded], num_rows: int) -> dict[str, np.ndarray]:
        """Return the arrays of a batch by the names that its tensors have; see `Columns`."""
        arrays: dict[str, np.ndarray] = {}
        dense = []
        is_jagged = self.plain["form"] == "jagged"
        for group, names in self.groups.items() if is_jagged else ():
            features = [encoded[name] for name in names]
            lengths = np.ones((len(names), num_rows), dtype=np.int32)
            for row, feature in zip(lengths, features, strict=True):
                if feature.offsets is not None:
                    row[:] = feature.lengths()
            ids = [feature.values for feature in features]
            arrays[f"{group}.values"] = np.concatenate(ids, dtype=np.int64)
            arrays[f"{group}.lengths"] = lengths.ravel()
            weights = [f"{name}.weights" for name in names]
            if weights[0] in encoded:
                parts = [encoded.pop(name).values for name in weights]
                arrays[f"{group}.weights"] = np.concatenate(parts)
        for name, feature in encoded.items():
            is_dense = self.features[name]["kind"] in DENSE_KINDS
            if feature.offsets is None and is_dense:
                dense.append(feature.values)
            elif is_dense or not is_jagged:
                values = feature.values if feature.offsets is None else self._padded(name, feature)
                arrays[name] = values if is_dense else values.astype(np.int64)
        if dense:
            arrays["dense"] = np.column_stack(dense)
        return arrays

    def _padded(self, name: str, feature: Encoded) -> np.ndarray:
        lengths = feature.lengths()
        size = self.features[name]["max_length"]
        padded = np.zeros((len(lengths), size), dtype=feature.values.dtype)
        padded[np.arange(size) < lengths[:, None]] = feature.values
        return padded

    def rows_of_values(self, table: str, values: list[Any]) -> list[int]:
        """Return the rows of values of a vocabulary; UNKNOWN of those that are not in it."""
        texts = pack(values)
        rows: list[int] = _by_value(texts, self._vocabularies[table].ids_of(texts)).tolist()
        return rows

    def arrays_of_rows(self, rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
        """Return the arrays of raw rows, dicts by column; what a row lacks is missing in it. Raises
        ValueError: an unknown column, a value of another type."""
        columns: dict[str, dict[str, Any]] = {}
        names: dict[str, None] = {}
        for feature in self.features.values():
            names |= dict.fromkeys(feature["sources"])
            for column in feature["columns"]:
                columns.setdefault(column, feature)
        for row in rows:
            unknown = sorted(row.keys() - names.keys())
            if unknown:
                raise ValueError(f"there is no column {unknown[0]!r}, but {', '.join(names)}")
        cells = {}
        for column, feature in columns.items():
            try:
                values = [_raw_value(row, column, feature) for row in rows]
                cells[column] = self._cells(feature, values)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"column '{column}': {error}") from None
        return self.arrays(self.encode(cells), len(rows))

    def _cells(self, feature: dict[str, Any], values: list[Any]) -> Cells:
        kind = feature["kind"]
        separator = feature["separator"]
        lengths = None
        if feature["max_length"] is not None:
            sequences = [_sequence(value, separator) for value in values]
            lengths = np.array(list(map(len, sequences)), dtype=np.int64)
            values = list(chain.from_iterable(sequences))
        if kind not in NUMERIC_KINDS:
            return Cells(pack(values), lengths)
        numbers = []
        for value in values:
            if kind in TIME_KINDS and isinstance(value, str):
                value = seconds_of(value)
            numbers.append(_number(value, is_text=separator is not None))
        return Cells(np.array(numbers, dtype=np.float64), lengths)


class _Vocabulary:
    """Ids of texts by their hashes: two texts with the same 64 bits are one value."""

    def __init__(self, values: list[str]) -> None:
        hashes = hash_texts(pack(values))
        order = np.argsort(hashes)
        # The largest number ends each search, and is unknown.
        self._ids = np.append(order + 1, UNKNOWN).astype(np.uint32)
        self._hashes = np.append(hashes[order], np.uint64(2**64 - 1))
        # By the upper bits of a hash: where those with the same bits begin, one or two of them. A
        # binary search through all of them takes 18 times as long.
        num_bits = max(1, len(hashes).bit_length())
        self._shift = np.uint64(64 - num_bits)
        upper_bits = np.arange(1 << num_bits, dtype=np.uint64)
        self._starts = np.searchsorted(self._hashes, upper_bits << self._shift)

    def ids_of(self, texts: Texts) -> np.ndarray:
        hashes = hash_texts(texts)
        position = self._starts[hashes >> self._shift]
        before = np.flatnonzero(self._hashes[position] < hashes)
        while len(before):
            position[before] += 1
            before = before[self._hashes[position[before]] < hashes[before]]
        is_known = self._hashes[position] == hashes
        return np.where(is_known, self._ids[position], np.uint32(UNKNOWN))


def _by_value(texts: Texts, results: np.ndarray) -> np.ndarray:
    """Return a result for each value, of results for each text; that of missing values is 0."""
    if texts.is_null is not None:
        results = np.where(texts.is_null, results.dtype.type(UNKNOWN), results)
    if texts.codes is None:
        return results
    # The last one is what the code -1 leads to.
    return np.take(np.append(results, results.dtype.type(UNKNOWN)), texts.codes, mode="wrap")


def _refuse_rows(is_wrong: Any, problem: str) -> None:
    if is_wrong.any():
        raise ValueError(f"row {is_wrong.argmax()} has {problem}")


def row_of(place: int, lengths: np.ndarray | None) -> int:
    """Return the row that a value is in."""
    if lengths is None:
        return int(place)
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def check_finite(
    values: np.ndarray, numbers: np.ndarray, lengths: np.ndarray | None = None
) -> None:
    """Raise ValueError with the row of a value that is not finite. numbers: its origin, or NaN."""
    places = np.flatnonzero(~np.isfinite(values) & ~np.isnan(numbers))
    if len(places):
        number = f"{numbers[places[0]]:g} in row {row_of(places[0], lengths)}"
        raise ValueError(
            f"{number} is no finite number in 32 bits; write it as missing, or bound it"
        )


def transformed(numbers: np.ndarray, feature: dict[str, Any]) -> np.ndarray:
    """Return numbers as they are fitted: an age of a time, a logarithm."""
    if feature["kind"] == "age":
        numbers = (seconds_of(feature["until"]) - numbers) / AGE_UNITS[feature["unit"]]
    return np.log1p(np.maximum(numbers, 0)) if feature.get("log") else numbers


def seconds_of(text: str) -> float:
    """Return seconds since 1970 of a number or an ISO text; without an offset, it is in UTC."""
    try:
        return float(text)
    except ValueError:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    time = time.replace(tzinfo=time.tzinfo or timezone.utc)
    return (time - datetime(1970, 1, 1, tzinfo=timezone.utc)) / timedelta(seconds=1)


def time_part(seconds: np.ndarray, part: str, zone: np.ndarray) -> np.ndarray:
    """Return a part of times as ids from 1 on; of missing ones, 0. zone: when its offsets from UTC
    begin, and the offsets, in seconds."""
    is_null = np.isnan(seconds)
    times = np.floor(np.where(is_null, 0, seconds)).astype(np.int64)
    times += zone[1][np.searchsorted(zone[0][1:], times, side="right")]
    hours = times // 3600
    days = hours // 24
    dates = days.astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    # The first day of 1970 was a Thursday.
    parts = {
        "hour": hours % 24,
        "weekday": (days + 3) % 7,
        "day": dates - months,
        "month": months.astype(np.int64) % 12,
    }
    return np.where(is_null, UNKNOWN, 1 + parts[part].astype(np.int64))


def _number(value: Any, *, is_text: bool) -> float:
    if is_text and isinstance(value, str) and NUMBER.fullmatch(value):
        return float(value)
    if value is not None and not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    return np.nan if value is None else float(value)


def _refuse_missing(cells: Cells, cause: str) -> None:
    missing = np.flatnonzero(_is_missing(cells.values))
    if len(missing):
        row = row_of(missing[0], cells.lengths)
        raise ValueError(f"a value is missing, the first in row {row}, {cause}")


def _is_missing(values: Any) -> np.ndarray:
    if not isinstance(values, Texts):
        return np.isnan(values)
    is_null = np.zeros(len(values.starts), dtype=bool) if values.is_null is None else values.is_null
    return is_null if values.codes is None else np.append(is_null, True)[values.codes]


def _sequence(value: Any, separator: str | None) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, str) and separator is not None:
        return value.split(separator)
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return value


def _raw_value(row: dict[str, Any], column: str, feature: dict[str, Any]) -> Any:
    """Return a row's value in a column: where the feature has a key, the one under it."""
    if feature["key"] is None:
        return row.get(column)
    entries = row.get(feature["column"])
    key = row.get(feature["key"])
    if entries is None or key is None:
        return None
    if not isinstance(entries, dict):
        raise ValueError(f"{entries!r} is no dict of values by key")
    return {_bytes(name): value for name, value in entries.items()}.get(_bytes(key))
