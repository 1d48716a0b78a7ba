"""Where rows are: row groups of Parquet files, here or in a cloud store, or blocks of a table in
memory."""

import glob
import hashlib
import json
import os
import posixpath
import re
import tempfile
import threading
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa
from pyarrow import csv, fs, parquet

from lightning_distrec.data.arrow_columns import errors_at
from lightning_distrec.errors import DataError, require

SUFFIXES = (".parquet", ".csv", ".tsv", ".txt", ".gz")
ROWS_PER_GROUP = 65_536
CSV_BLOCK_BYTES = 2**24
"""Of text, which become a row group."""
FORMAT = 2
"""Of what is kept in cache_dir; other formats are made again."""


class RowGroup(NamedTuple):
    """Rows `first` to before `first + num_rows` of a row group."""

    file: str
    number: int
    first: int
    num_rows: int
    version: str | None = None
    """Of the file when its rows were counted; None: nobody else writes it."""

    def place(self) -> str:
        """Return where these rows are, as errors begin."""
        offset = f" from row {self.first}" if self.first else ""
        return f"{self.file}, row group {self.number}{offset}, "


class Reader(Protocol):
    """Reads row groups; workers receive a pickled copy."""

    types: dict[str, pa.DataType]
    """Of each column, in the source."""

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Return the columns of a row group. Raises DataError with the column, or OSError."""


class TableReader:
    """Reads blocks of a table in memory."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.types = dict(zip(table.schema.names, table.schema.types, strict=True))

    def groups(self) -> list[RowGroup]:
        """Return the blocks."""
        starts = range(0, self.table.num_rows, ROWS_PER_GROUP)
        counts = [min(ROWS_PER_GROUP, self.table.num_rows - start) for start in starts]
        return [RowGroup("the table", number, 0, count) for number, count in enumerate(counts)]

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Return the columns of a block."""
        return self.table.select(columns).slice(
            group.number * ROWS_PER_GROUP + group.first, group.num_rows
        )


class ParquetReader:
    """Reads row groups of files. types: column -> type, which all files are read as."""

    def __init__(self, types: dict[str, pa.DataType]) -> None:
        self.types = types

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Return the columns of a row group. Raises DataError: the file has changed, or a column
        cannot be read."""
        try:
            table = self._read(group, columns)
        except (OSError, IndexError, pa.ArrowException):
            _check_version(group)
            for column in columns:
                with errors_at(f"column '{column}': "):
                    self._read(group, [column])
            raise
        # After reading: the file may change meanwhile.
        _check_version(group)
        return table

    def _read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        # Texts as dictionaries, as most files have them: each different one is hashed once.
        values = {column: getattr(kind, "value_type", kind) for column, kind in self.types.items()}
        texts = tuple(
            column for column, kind in values.items() if kind in (pa.string(), pa.large_string())
        )
        file = _opened(group.file, _reading_thread(), texts)
        table = file.read_row_group(group.number, columns=list(columns), use_threads=False).select(
            columns
        )
        for place, column in enumerate(columns):
            if table.schema.types[place] != self.types[column] and column not in texts:
                table = table.set_column(place, column, table[column].cast(self.types[column]))
        return table.slice(group.first, group.num_rows)


def _check_version(group: RowGroup) -> None:
    if group.version is None:
        return
    version = _version_of(group.file)
    if version != group.version:
        raise DataError(
            f"the file has changed since its rows were counted: then {group.version}, now "
            f"{version}. Start again, and write new files under new names while a run reads."
        )


def _version_of(file: str) -> str:
    store, path = _store(file, os.getpid())
    info = store.get_file_info([path])[0]
    return f"{info.size} bytes at {info.mtime_ns} ns" if info.is_file else "no file"


@lru_cache(maxsize=4)
def _store(file: str, process: int) -> tuple[fs.FileSystem, str]:
    return store_of(file)


def _reading_thread() -> tuple[int, int]:
    # Connections of a store do not survive a fork, and a reader is of one thread.
    return os.getpid(), threading.get_ident()


@lru_cache(maxsize=32)
def _opened(file: str, thread: tuple[int, int], texts: tuple[str, ...] = ()) -> parquet.ParquetFile:
    store, path = _store(file, thread[0])
    source = store.open_input_file(path)
    metadata = parquet.ParquetFile(source).metadata
    leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    # The path of a list's values begins with the column's name.
    dictionaries = [leaf for leaf in leaves if leaf.partition(".")[0] in texts]
    return parquet.ParquetFile(
        source, metadata=metadata, pre_buffer="://" in file, read_dictionary=dictionaries
    )


def store_of(path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or a URL, and the path in it: pyarrow's own, else
    fsspec's."""
    if "://" not in path:
        return fs.LocalFileSystem(), path
    try:
        store, inner = fs.FileSystem.from_uri(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        require("fsspec", f"reading {path}")
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        remote, inner = url_to_fs(path)
        store = fs.PyFileSystem(fs.FSSpecHandler(remote))
    return store, inner


def find_files(paths: Iterable[str]) -> list[tuple[str, int, str]]:
    """Return the files of names, globs and folders in their order, those of a folder by name: file,
    bytes, time.

    Raises DataError: a path leads to no file, or a file is of no known type.
    """
    files: list[tuple[str, int, str]] = []
    _opened.cache_clear()  # of files that were replaced since
    for path in paths:
        with errors_at(f"{path}: "):
            infos = _infos(path)
        if not infos:
            raise DataError(
                f"{path}: there is no such file. Name files, globs or folders of "
                f"{', '.join(SUFFIXES)}."
            )
        is_remote = "://" in path and not path.startswith("file://")
        prefix = path.partition("://")[0] + "://" if is_remote else ""
        for info in infos:
            files.append((
                prefix + info.path.lstrip("/" if prefix else ""),
                info.size,
                str(info.mtime),
            ))
    for file, _, _ in files:
        if not file.endswith(SUFFIXES):
            raise DataError(f"{file}: the name must end in {', '.join(SUFFIXES)}.")
    return files


def _infos(path: str) -> list[fs.FileInfo]:
    store, inner = store_of(path)
    is_glob = any(mark in inner for mark in "*?[")
    if is_glob and "://" not in path:
        infos = store.get_file_info(glob.glob(inner, recursive=True))
    elif is_glob:
        first_mark = re.search(r"[*?[]", inner)
        before_mark = inner[: first_mark.start()] if first_mark else inner
        folder = posixpath.dirname(before_mark + "x")
        infos = store.get_file_info(fs.FileSelector(folder, recursive=True))
        infos = [info for info in infos if _matches(info.path.strip("/"), inner.strip("/"))]
    else:
        infos = store.get_file_info([inner])
        if infos[0].type == fs.FileType.Directory:
            infos = store.get_file_info(fs.FileSelector(inner, recursive=True))
            infos = [info for info in infos if info.path.endswith(SUFFIXES)]
    return sorted((info for info in infos if info.is_file), key=lambda info: str(info.path))


def _matches(path: str, pattern: str) -> bool:
    """Return whether a glob leads to a path: as on a disk, only ** leads through several
    folders."""
    return fnmatch(path, pattern) and ("**" in pattern or path.count("/") == pattern.count("/"))


def split_groups(groups: list[RowGroup], num_rows: int) -> tuple[list[RowGroup], list[RowGroup]]:
    """Return the first `num_rows` rows, and the others; a row group on the border is in both
    lists."""
    first = []
    second = []
    for group in groups:
        size = min(group.num_rows, num_rows)
        num_rows -= size
        if size:
            first.append(group._replace(num_rows=size))
        if size < group.num_rows:
            second.append(group._replace(first=group.first + size, num_rows=group.num_rows - size))
    return first, second


def parquet_schema(file: str, *, is_ours: bool = False) -> tuple[pa.Schema, list[RowGroup]]:
    """Return the columns of a file and its row groups. is_ours: `as_parquet` has written it.

    Raises DataError: it cannot be read.
    """
    with errors_at(f"{file}: "):
        version = None if is_ours else _version_of(file)
        opened = _opened(file, _reading_thread())
    counts = [
        opened.metadata.row_group(number).num_rows
        for number in range(opened.metadata.num_row_groups)
    ]
    groups = [
        RowGroup(file, number, 0, count, version) for number, count in enumerate(counts) if count
    ]
    return opened.schema_arrow, groups


def as_parquet(
    file: tuple[str, int, str],
    folder: Path,
    names: list[str] | None,
    delimiter: str,
    types: dict[str, pa.DataType],
) -> str:
    """Return a file of text as a Parquet file in `folder`, written once. names: of columns, where
    it has no header.

    Raises DataError with the file, and with the column and the row where a value does not fit.
    """
    facts = [FORMAT, *file, names, delimiter, {name: str(kind) for name, kind in types.items()}]
    target = folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.parquet"
    if target.exists():
        return str(target)
    folder.mkdir(parents=True, exist_ok=True)
    store, path = store_of(file[0])
    options = csv.ConvertOptions(
        column_types=types, include_columns=list(types), strings_can_be_null=True, null_values=[""]
    )
    read = csv.ReadOptions(column_names=names, block_size=CSV_BLOCK_BYTES)
    # Else a block of text ends at any line break, in quotes, too, and a row becomes two.
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with (
        errors_at(f"{file[0]}: "),
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        store.open_input_stream(path) as stream,
    ):
        unfinished = Path(scratch, target.name)
        with (
            csv.open_csv(stream, read, parse, options) as batches,
            parquet.ParquetWriter(unfinished, batches.schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
        # In one step: another node that shares the disk may write the same file.
        os.replace(unfinished, target)
    return str(target)
