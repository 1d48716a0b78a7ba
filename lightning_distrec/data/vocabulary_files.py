"""Reads vocabularies that something else has counted, such as Spark, BigQuery or DuckDB."""

import pyarrow as pa
from pyarrow import compute, csv, parquet, types

from lightning_distrec.data.arrow_columns import errors_at, type_problem
from lightning_distrec.data.features import Vocabulary
from lightning_distrec.data.row_groups import store_of
from lightning_distrec.data.statistics import ValueCounts
from lightning_distrec.errors import DataError


def read_vocabulary(feature: Vocabulary) -> list[str]:
    """Return the values of a feature's file in the order of rows.

    The file is Parquet, or CSV with a header. It has the column `value`, and may have `count`: then
    the most frequent values come first, else values stay in their order. Raises DataError: it does
    not fit.
    """
    with errors_at(f"vocabulary: file={feature.file}: "):
        table = _read(str(feature.file))
        _check(table, feature)
        if "count" not in table.column_names:
            texts: list[str] = table["value"].cast(pa.large_string()).to_pylist()
            return texts
        counts = ValueCounts(feature)
        counts.add_counts(table["value"], table["count"].cast(pa.int64()))
        return counts.result()


def _read(file: str) -> pa.Table:
    store, path = store_of(file)
    with store.open_input_file(path) as source:
        if file.endswith(".parquet"):
            table = parquet.read_table(source)
        else:
            # As texts: 007 is no 7.
            options = csv.ConvertOptions(column_types={"value": pa.large_string()})
            table = csv.read_csv(source, convert_options=options)
    return table


def _check(table: pa.Table, feature: Vocabulary) -> None:
    """Raise DataError where a value has no row, or two."""
    if "value" not in table.column_names:
        raise DataError(f"there is no column 'value', but {', '.join(table.column_names)}.")
    values = table["value"]
    problem = type_problem(values.type, Vocabulary(rows=feature.rows))
    if problem is not None:
        raise DataError(f"column 'value' has the type {values.type}: {problem}.")
    if values.null_count:
        raise DataError("column 'value' has missing values; leave them out: their row is 0.")
    repeated = compute.value_counts(values.cast(pa.large_string()))
    repeated = repeated.filter(compute.greater(repeated.field(1), 1))
    if len(repeated):
        raise DataError(f"the value {repeated[0]['values'].as_py()!r} is there more than once.")
    if "count" in table.column_names:
        counts = table["count"]
        if not types.is_integer(counts.type) or counts.null_count:
            raise DataError("column 'count' must be integers without missing ones.")
    elif len(values) >= feature.rows or feature.min_count > 1:
        raise DataError(
            f"there are {len(values)} values, rows={feature.rows}, min_count={feature.min_count}. "
            f"Set rows={len(values) + 1} or more and no min_count, or add the column 'count'."
        )
