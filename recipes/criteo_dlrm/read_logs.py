"""Reads Criteo's click logs: tab-separated text (.tsv, .txt, also .gz) or Parquet with the same 40 columns."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute, csv, parquet

from lightning_distrec.errors import DataError
from recipes.criteo_dlrm.columns import CATEGORIES, INTEGERS
from recipes.criteo_dlrm.generator import Block

LABEL = "label"
COLUMNS = (LABEL, *INTEGERS, *CATEGORIES)
DIGITS = 8


def read_log(file: Path) -> Iterator[Block]:
    """Yield the examples of one file, some ten thousand at a time, in its order; `log_odds` are not known: NaN.

    Raises DataError: the file is missing or another format, or a value is no integer or no 8 hexadecimal digits.
    """
    if not file.is_file():
        raise DataError(f"{file}: there is no such file.")
    try:
        for table in _parquet(file) if file.suffix == ".parquet" else _text(file):
            yield _block(file, table)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{file}: {str(error).splitlines()[0]} Expected the columns {LABEL}, I1..I13, C1..C26."
        ) from None


def _text(file: Path) -> Iterator[pa.RecordBatch]:
    types = {name: pa.int64() for name in (LABEL, *INTEGERS)} | {name: pa.string() for name in CATEGORIES}
    with csv.open_csv(
        file,
        csv.ReadOptions(column_names=list(COLUMNS)),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
    ) as batches:
        yield from batches


def _parquet(file: Path) -> Iterator[pa.RecordBatch]:
    opened = parquet.ParquetFile(file)
    if missing := [name for name in COLUMNS if name not in opened.schema_arrow.names]:
        raise DataError(
            f"{file}: expected the columns {LABEL}, I1..I13, C1..C26; there is no {', '.join(missing[:5])}."
        )
    yield from opened.iter_batches(columns=list(COLUMNS))


def _block(file: Path, table: pa.RecordBatch) -> Block:
    integers = np.stack([_integers(table.column(name)) for name in INTEGERS], axis=1)
    labels = _integers(table.column(LABEL))
    if not np.isin(labels, (0, 1)).all():
        raise DataError(f"{file}: expected 0 or 1 as label, there is {labels[~np.isin(labels, (0, 1))][0]}.")
    return Block(
        integers=integers,
        tokens=np.stack([_tokens(file, name, table.column(name)) for name in CATEGORIES], axis=1),
        labels=labels[:, None].astype(np.float32),
        log_odds=np.full((len(labels), 1), np.nan, dtype=np.float32),
    )


def _integers(column: pa.Array) -> np.ndarray:
    return compute.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)


def _tokens(file: Path, name: str, column: pa.Array) -> np.ndarray:
    """Return (N,) uint32; what is missing is 0. Parquet may hold the numbers themselves."""
    if pa.types.is_integer(column.type):
        return compute.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False).astype(np.uint32)
    texts = compute.fill_null(column, "0" * DIGITS)
    wrong = compute.invert(compute.match_substring_regex(texts, f"^[0-9a-fA-F]{{{DIGITS}}}$"))
    if compute.any(wrong).as_py():
        raise DataError(f"{file}: expected 8 hexadecimal digits as {name}, there is '{texts.filter(wrong)[0]}'.")
    # All texts have 8 digits: the letters are one array, and a digit's value is a look-up.
    letters = np.frombuffer("".join(texts.to_pylist()).encode(), dtype=np.uint8).reshape(-1, DIGITS)
    digits = np.where(letters < ord("A"), letters - ord("0"), (letters | 0x20) - ord("a") + 10).astype(np.uint32)
    return (digits << np.arange(4 * (DIGITS - 1), -1, -4, dtype=np.uint32)).sum(1, dtype=np.uint32)
