"""Reads columns of Arrow as raw values for the encoder, whole columns at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from lightning_distrec.data.features import Feature
from lightning_distrec.data.raw_values import Cells, Texts, seconds_of
from lightning_distrec.errors import ConfigError, DataError


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Raise errors of files and values as DataErrors that begin with `place`."""
    try:
        yield
    except (DataError, pa.ArrowException, OSError, LookupError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{place}{lines[0]}") from error


def table_of(source: Any) -> pa.Table:
    """Return rows in memory as a table. Raises ConfigError, DataError: it is none."""
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "collect"):  # a LazyFrame of polars
        source = source.collect()
    if not (hasattr(source, "iloc") or hasattr(source, "__arrow_c_stream__")):
        raise ConfigError(
            f"data is a {type(source).__name__}: give paths, a pandas or polars DataFrame or a "
            "pyarrow Table."
        )
    try:
        if hasattr(source, "iloc"):
            return pa.Table.from_pandas(source, preserve_index=False)
        table = pa.table(source)
        fields = [field.with_type(_without_views(field.type)) for field in table.schema]
        return table.cast(pa.schema(fields))
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"the DataFrame: {error}") from error


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Return the type as Parquet has it, of one that polars has."""
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return pa.large_list(_without_views(kind.value_type)) if is_list else kind


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
    if getattr(feature, "zone", "UTC") != "UTC" and types.is_date(value):
        return "dates are alike in all zones; omit zone"
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


def check_fields(columns: list[str], schema: pa.Schema, first: pa.Schema, file: str) -> None:
    """Raise DataError where a struct has fields that the one of the first file lacks: files are
    read with its types, and their values would be missing."""
    for column in columns:
        kinds = [each.field(column).type for each in (schema, first)]
        if all(map(types.is_struct, kinds)):
            names, first_names = ([field.name for field in kind] for kind in kinds)
            new = sorted({*names} - {*first_names})
            if new:
                raise DataError(
                    f"{file}: column '{column}' has the fields {', '.join(new[:9])}, which the "
                    "first file lacks. Give all files the same fields, or write maps."
                )


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
    array = _as_one(column)
    return (array, None) if feature.max_length is None else _flattened(array, feature.separator)


def _as_one(column: Any) -> pa.Array:
    array = column
    if isinstance(column, pa.ChunkedArray):
        # A single chunk would be copied.
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # more text than 32-bit offsets can address
        array = pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in array.chunks])
    return array


def _flattened(array: pa.Array, separator: str | None) -> tuple[pa.Array, np.ndarray]:
    if types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if types.is_null(array.type):
        array = array.cast(pa.list_(pa.null()))
    if separator is not None and _is_text(array.type):
        # An empty text is an empty sequence, not one of an empty text.
        array = compute.split_pattern(
            compute.if_else(compute.equal(array, ""), None, array), separator
        )
    lengths = compute.fill_null(compute.list_value_length(array), 0)
    return compute.list_flatten(array), lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def column_in(table: pa.Table, column: str, feature: Feature) -> Any:
    """Return a column of a feature's values: where it has a key, those that the rows' maps have
    under the rows' keys, and null where they have none.

    Maps are maps, or structs whose fields are keys. Raises ValueError: another type.
    """
    if feature.key is None:
        return table[column]
    return _looked_up(*map(table.column, feature.sources(column)))


def _looked_up(maps: Any, keys: Any) -> pa.Array:
    array = _as_one(maps)
    texts = _key_texts(_as_one(keys))
    kind = array.type
    if types.is_null(kind) or types.is_struct(kind) and not kind.num_fields:
        return pa.nulls(len(array))
    rows = np.arange(len(array))
    if types.is_struct(kind):
        fields = [pa.table({"value": values}) for values in array.flatten()]
        values = _as_one(pa.concat_tables(fields, promote_options="permissive")["value"])
        names = pa.array(np.repeat([field.name for field in kind], len(rows)))
        rows = np.tile(rows, len(fields))
    elif types.is_map(kind):
        pair = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        entries, lengths = _flattened(array.cast(pa.list_(pair)), None)
        names, values = entries.flatten()
        rows = np.repeat(rows, lengths)
    else:
        raise ValueError(f"key needs a column of maps, and the type is {kind}")
    is_asked = compute.equal(_key_texts(names), texts.take(pa.array(rows))).fill_null(False)
    matches = np.flatnonzero(is_asked.to_numpy(zero_copy_only=False))
    # The last of equal keys counts, as in a dict.
    places = np.full(len(array), -1)
    places[rows[matches]] = matches
    return values.take(pa.array(places, mask=places < 0))


def _key_texts(keys: pa.Array) -> pa.Array:
    kind = _value_type(keys.type)
    if not (_is_text(kind) or types.is_integer(kind) or types.is_boolean(kind)):
        raise ValueError(f"keys are texts, integers or booleans, and the type is {kind}")
    return keys.cast(pa.string())


def cells_of(column: Any, feature: Feature) -> Cells:
    """Return a column as the encoder reads it. Raises pyarrow.ArrowInvalid: a value is of another
    type."""
    values, lengths = flat_values(column, feature)
    return Cells(numbers_for(values, feature) if feature.is_numeric else texts_of(values), lengths)


def numbers_for(values: pa.Array, feature: Feature) -> np.ndarray:
    """Return (N,) float64 of numbers or times; what is missing is NaN."""
    return seconds_from(values) if feature.is_time else numbers_of(values)


def seconds_from(values: pa.Array) -> np.ndarray:
    """Return times as seconds since 1970, (N,) float64; what is missing is NaN."""
    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if types.is_timestamp(values.type) or types.is_date(values.type):
        # Texts have microseconds, too: what is finer is dropped here as there, also before 1970.
        kind = pa.timestamp("us", tz=getattr(values.type, "tz", None))
        if getattr(values.type, "unit", "") == "ns":
            values = compute.floor_temporal(values, unit="microsecond")
        microseconds = values.cast(kind, safe=False).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return np.divide(microseconds, 1e6)
    if not _is_text(values.type) or types.is_null(values.type):
        numbers = numbers_of(values)
    else:
        texts = [np.nan if text is None else seconds_of(text) for text in values.to_pylist()]
        numbers = np.array(texts, dtype=np.float64)
    _refuse_dates(numbers)
    return numbers


def _refuse_dates(numbers: np.ndarray) -> None:
    """Raise ValueError where all numbers are dates such as 20240301, which as seconds are in August
    1970."""
    known = numbers[~np.isnan(numbers)]
    if not len(known) or known.min() < 19_000_101 or known.max() > 21_001_231:
        return
    months = known // 100 % 100
    days = known % 100
    if np.all((months >= 1) & (months <= 12) & (days >= 1) & (days <= 31)):
        date = f"{known[0]:.0f}"
        raise ValueError(
            f"{date} is no time: write dates as {date[:4]}-{date[4:6]}-{date[6:]}, or seconds "
            "since 1970"
        )


def numbers_of(values: pa.Array) -> np.ndarray:
    """Return (N,) float64; what is missing is NaN. Raises ValueError: an integer has no float64."""
    try:
        numbers = compute.fill_null(values.cast(pa.float64()), np.nan).to_numpy()
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
        codes = compute.fill_null(values.indices.cast(pa.int32()), -1).to_numpy()
        return texts._replace(codes=codes.astype(np.int64))
    is_null = compute.is_null(values).to_numpy(zero_copy_only=False) if values.null_count else None
    if not types.is_string(values.type) and not types.is_large_string(values.type):
        values = values.cast(pa.string())
    kind = np.int64 if types.is_large_string(values.type) else np.int32
    _, ends, data = values.buffers()
    offsets = (
        np.frombuffer(ends, kind)[values.offset :][: len(values) + 1] if ends else np.zeros(1, kind)
    )
    return Texts(
        np.frombuffer(data or b"", np.uint8),
        offsets[:-1],
        offsets[1:],
        is_null,
    )
