"""A LightningDataModule over files or a table, whose features are written down as plain types."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import torch
from pyarrow import compute

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.data.arrow_columns import errors_at
from lightning_distrec.data.columns import Columns, Form
from lightning_distrec.data.encoded_rows import EncodedRows
from lightning_distrec.data.row_groups import (
    FORMAT,
    ParquetReader,
    Reader,
    RowGroup,
    TableReader,
    as_parquet,
    find_files,
    parquet_schema,
)
from lightning_distrec.data.row_order import RowLoader, RowOrder, RowSampler
from lightning_distrec.errors import ConfigError, DataError


class ColumnData(pl.LightningDataModule):
    """Batches of features from columns; see Columns for what a batch holds.

    Features are fitted on the training data once, and are part of checkpoints, so that a run that
    resumes, tests or is exported maps values as it was trained.
    """

    def __init__(
        self,
        train: Any = None,
        features: dict[str, Any] | None = None,
        label: str | list[str] | None = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        form: Form = "jagged",
        batch_size: int = 1024,
        buffer_rows: int = 131_072,
        seed: int = 1,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache_dir: str = "data/columns",
        delimiter: str = ",",
        column_names: list[str] | None = None,
        label_range: tuple[float, float] | None = None,
        keep: list[str] | None = None,
    ) -> None:
        """Set where rows are, and what is made of them. A subclass may set tables as `sources` in
        its setup.

        Args:
            train: a path or a list: files, globs or folders of .parquet, .csv, .tsv, .txt, also
                .gz; local, or URLs (s3://, gs://, ...) that pyarrow or fsspec reads.
                In a script also a DataFrame or a pyarrow Table.
            features: name -> a feature with its kind: hash, vocabulary, bucketize, number, time,
                age or cross.
            label: a column of numbers, or several.
            val: as train; or the share of the training rows that validates: the last ones, but for
                those that test.
            test: as train; or the share of the training rows, the last ones, that tests.
            predict: as train; its labels are not read.
            form: "jagged" for TorchRec's collections and nn.EmbeddingBag, "padded" for
                nn.Embedding.
            batch_size: rows per rank and step.
            buffer_rows: rows that are shuffled with each other. A worker holds them encoded, 4
                bytes an id.
            seed: of the order of rows; each epoch has another one.
            num_workers: processes that read and encode; 0: the training process.
            pin_memory: copy batches into pinned memory; null: where CUDA is available.
            cache_dir: where text files are kept as Parquet, and what was fitted.
            delimiter: between the values of text files.
            column_names: of text files without a header.
            label_range: the lowest and the highest label; another one is an error before training.
                For clicks [0, 1].
            keep: columns of `predict` that PredictionWriter writes beside predictions.
        """
        super().__init__()
        if min(batch_size, buffer_rows) < 1 or num_workers < 0:
            raise ConfigError(
                f"batch_size={batch_size}, buffer_rows={buffer_rows}, num_workers={num_workers}: "
                "at least 1, 1 and 0."
            )
        if all(source is None for source in (train, val, test, predict)):
            raise ConfigError("there is no data: set train, val, test or predict.")
        if keep and predict is None:
            raise ConfigError(f"keep={keep}: its columns are those of predict. Set predict.")
        self.columns = Columns(features or {}, label, form)
        self.sources = {"train": train, "val": val, "test": test, "predict": predict}
        self.batch_size = batch_size
        self.buffer_rows = buffer_rows
        self.seed = seed
        self.num_workers = num_workers
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.cache_dir = Path(cache_dir)
        self.delimiter = delimiter
        self.column_names = column_names
        self.label_range = label_range
        self.keep = list(keep or [])
        shares = [share for share in (val, test) if isinstance(share, float)]
        if (
            any(not 0 < share < 1 for share in shares)
            or sum(shares) >= 1
            or (shares and train is None)
        ):
            raise ConfigError(
                f"val={val}, test={test}: shares lie between 0 and 1, and leave some rows to train "
                "on."
            )
        self.groups: dict[str, list[RowGroup]] = {}
        self.readers: dict[str, Reader] = {}

    @property
    def _is_in_memory(self) -> bool:
        return not all(
            _is_paths(source)
            for source in self.sources.values()
            if not isinstance(source, float | None)
        )

    def prepare_data(self) -> None:
        """Look for files, convert text, and fit the features; one process per node does this, for
        files."""
        if self._is_in_memory:
            return
        # Every rank's setup raises errors, of files that are not there, too: this process alone
        # would leave the others waiting for it.
        with suppress(DataError):
            path = self._prepared_path()
            if not path.exists() or "error" in json.loads(path.read_text()):
                try:
                    prepared = self._prepare()
                except DataError as error:
                    prepared = {"error": str(error)}
                replace_file(path, json.dumps(prepared).encode())

    def setup(self, stage: str | None = None) -> None:
        """Take what was prepared; every rank does. Raises DataError: a file, a column or its type
        does not fit."""
        if self.groups:
            return
        if not self._is_in_memory and not self._prepared_path().exists():
            raise DataError(
                f"{self._prepared_path()}: nothing is prepared. Call prepare_data first, on every "
                "node."
            )
        prepared = (
            self._prepare() if self._is_in_memory else json.loads(self._prepared_path().read_text())
        )
        if "error" in prepared:
            raise DataError(prepared["error"])
        for stage, groups in prepared["groups"].items():
            self.groups[stage] = [RowGroup(*group) for group in groups]
        if not self.readers:
            for stage, groups in self.groups.items():
                self.readers[stage] = self._reader(stage, groups)
        if prepared["columns"] is not None:
            self.columns = Columns.from_plain(prepared["columns"])

    def _prepared_path(self) -> Path:
        """Return where the result of `prepare_data` is, a name that changes with files and
        settings."""
        files = {}
        for stage, source in self.sources.items():
            files[stage] = find_files(_paths(source)) if _is_paths(source) else source
        features = {name: feature.plain(name) for name, feature in self.columns.features.items()}
        facts = [
            FORMAT,
            files,
            features,
            self.columns.label,
            self.columns.form,
            self.delimiter,
            self.column_names,
        ]
        facts += [self.label_range, self.keep]
        return (
            self.cache_dir / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
        )

    def _prepare(self) -> dict[str, Any]:
        """Return the row groups of each stage, and the fitted columns, as JSON has them."""
        data = {stage: source for stage, source in self.sources.items() if source is not None}
        groups = {
            stage: self._find_groups(stage)
            for stage, source in data.items()
            if not isinstance(source, float)
        }
        total = remaining = sum(group.num_rows for group in groups.get("train", []))
        for stage in ("test", "val"):  # the last rows test
            share = self.sources[stage]
            if isinstance(share, float):
                remaining -= round(total * share)
                groups["train"], groups[stage] = _split(groups["train"], remaining)
        self.readers = {stage: self._reader(stage, groups[stage]) for stage in groups}
        plain = None
        if "train" in groups:
            plain = self._fitted(groups["train"]).to_plain()
        return {"groups": groups, "columns": plain}

    def _fitted(self, groups: list[RowGroup]) -> Columns:
        place = ""

        def tables() -> Iterator[pa.Table]:
            nonlocal place
            for group in groups:
                place = group.place()
                yield self.readers["train"].read(group, self.columns.columns)

        try:
            return self.columns.fit(tables())
        except DataError as error:
            raise DataError(f"{place}{error}") from error

    def _find_groups(self, stage: str) -> list[RowGroup]:
        """Return the row groups of a source. Raises DataError: none, or a column is missing or does
        not fit."""
        source = self.sources[stage]
        groups = []
        keep = self.keep if stage == "predict" else []
        columns = Columns(self.columns.features, None if stage == "predict" else self.columns.label)
        if not _is_paths(source):
            place = f"the table of {stage}"
            reader = TableReader(_table_of(source))
            self.readers[stage] = reader
            columns.check_schema(reader.table.schema, place, keep)
            groups = reader.groups()
            self._check_labels(columns.labels, place, reader, groups)
        else:
            texts = [*columns.text_columns, *keep]
            types = {
                column: pa.string() if column in texts else pa.float64()
                for column in [*columns.columns, *keep]
            }
            for entry in find_files(_paths(source)):
                file = entry[0]
                is_text = not file.endswith(".parquet")
                text = (self.cache_dir, self.column_names, self.delimiter, types)
                path = as_parquet(entry, *text) if is_text else file
                schema, file_groups = parquet_schema(path, is_ours=is_text)
                columns.check_schema(schema, file, keep)
                labels = ParquetReader({
                    column: schema.field(column).type for column in columns.labels
                })
                self._check_labels(columns.labels, file, labels, file_groups)
                groups += file_groups
        if not groups:
            raise DataError(f"{stage}: there are no rows.")
        return groups

    def _check_labels(
        self, labels: list[str], place: str, reader: Reader, groups: list[RowGroup]
    ) -> None:
        """Raise DataError where a label is outside of `label_range`."""
        for group in groups if self.label_range and labels else ():
            low, high = self.label_range  # type: ignore[misc]
            with errors_at(group.place()):
                table = reader.read(group, labels)
            for column in labels:
                with errors_at(f"{place}: column '{column}' "):
                    extremes = compute.min_max(table[column].cast(pa.float64())).as_py()
                for label in extremes.values():
                    if label is not None and not low <= label <= high:
                        raise DataError(
                            f"{place}: column '{column}' has the label {label:g}, which "
                            f"label_range excludes: {low:g} to {high:g}."
                        )

    def _reader(self, stage: str, groups: list[RowGroup]) -> Reader:
        source = stage if not isinstance(self.sources[stage], float) else "train"
        if not _is_paths(self.sources[source]):
            return self.readers[source]
        # All files are read with the types of the first one: features may differ by them.
        schema = parquet_schema(groups[0].file)[0]
        names = [column for column in [*self.columns.columns, *self.keep] if column in schema.names]
        return ParquetReader({column: schema.field(column).type for column in names})

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted features, for checkpoints."""
        return {"columns": self.columns.to_plain()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the features as they were fitted. Raises ConfigError: they were others."""
        columns = Columns.from_plain(state_dict["columns"])
        for name in {**columns.features, **self.columns.features}:
            plain = []
            for c in (columns, self.columns):
                plain.append(c.features[name].plain(name) if name in c.features else None)
            if plain[0] != plain[1]:
                raise ConfigError(
                    f"the checkpoint was trained with another feature '{name}'. Set features as "
                    "they were."
                )
        self.columns = columns

    def train_dataloader(self) -> RowLoader:
        """Rows in random order."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        """Rows in order; nothing without `val`."""
        return self._loader("val") if self.sources["val"] is not None else []

    def test_dataloader(self) -> RowLoader:
        """Rows in order."""
        return self._loader("test")

    def predict_dataloader(self) -> RowLoader:
        """Rows of `predict` in order, or those of `test` or `val`, without labels."""
        stage = next(stage for stage in ("predict", "test", "val", "train") if stage in self.groups)
        loader = self._loader(stage, labels=False)
        loader.dataset.keep = self.keep  # type: ignore[attr-defined]
        return loader

    def _loader(self, stage: str, *, shuffle: bool = False, labels: bool = True) -> RowLoader:
        if stage not in self.groups:
            raise ConfigError(
                f"there is no data for {stage}: set {stage}, or the share of the training rows for "
                "it."
            )
        groups = self.groups[stage]
        order = RowOrder(
            [group.num_rows for group in groups],
            shuffle=shuffle,
            seed=self.seed,
            buffer_rows=self.buffer_rows,
        )
        names = [name for name in self.columns.columns if labels or name not in self.columns.labels]
        ranks = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {
            "num_replicas": 1,
            "rank": 0,
        }
        sampler = RowSampler(
            order, ranks["num_replicas"], ranks["rank"], self.num_workers, self.batch_size
        )
        return RowLoader(
            EncodedRows(self.readers[stage], groups, self.columns, order, names),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0 and shuffle,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
        )

    def raw_rows(self) -> list[dict[str, Any]]:
        """Return the rows of predict_dataloader's first batch by column, in JSON's types, without
        labels."""
        loader: Any = self.predict_dataloader()
        count = sum(stop - first for first, stop in loader.sampler.shares.batch(0, 0))
        rows: list[dict[str, Any]] = []
        for group in loader.dataset.groups:
            table = loader.dataset.reader.read(group, loader.dataset.names).slice(
                0, count - len(rows)
            )
            for row in table.to_pylist():
                rows.append({column: _plain(value) for column, value in row.items()})
            if len(rows) == count:
                break
        return rows


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN is missing, a decimal a number, and a time its ISO
    text."""
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, (float, Decimal)):
        return None if value != value else float(value)
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    return value.isoformat() if isinstance(value, date) else value


def _is_paths(source: Any) -> bool:
    return isinstance(source, (str, Path)) or (
        isinstance(source, Sequence) and all(isinstance(p, (str, Path)) for p in source)
    )


def _paths(source: Any) -> list[str]:
    return [str(source)] if isinstance(source, (str, Path)) else list(map(str, source))


def _table_of(source: Any) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if not hasattr(source, "columns"):
        raise ConfigError(
            f"data is a {type(source).__name__}: give paths, a pandas DataFrame or a pyarrow Table."
        )
    try:
        return pa.Table.from_pandas(source, preserve_index=False)
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"the DataFrame: {error}") from error


def _split(groups: list[RowGroup], num_rows: int) -> tuple[list[RowGroup], list[RowGroup]]:
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


def _as_it_is(batch: Any) -> Any:
    # A function at module level, so that workers can receive it.
    return batch
