"""A LightningDataModule over files or a table, whose features are written down as plain types."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.trainer.states import TrainerFn
from pyarrow import compute

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.data.arrow_columns import check_fields, errors_at, table_of
from lightning_distrec.data.columns import Columns, Form
from lightning_distrec.data.encoded_rows import EncodedRows
from lightning_distrec.data.fitting import connected, fit_on, is_large
from lightning_distrec.data.growth import Growth, check_same, grown, other_feature
from lightning_distrec.data.row_groups import (
    FORMAT,
    ParquetReader,
    Reader,
    RowGroup,
    TableReader,
    as_parquet,
    find_files,
    parquet_schema,
    split_groups,
)
from lightning_distrec.data.row_order import RowLoader, RowOrder, RowSampler
from lightning_distrec.errors import ConfigError, DataError

_TRAINED: WeakKeyDictionary[pl.LightningModule, Columns] = WeakKeyDictionary()
"""The features that this process has trained modules with, or loaded with their weights."""


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
        num_workers: int = 1,
        pin_memory: bool | None = None,
        cache_dir: str = "data/columns",
        delimiter: str = ",",
        column_names: list[str] | None = None,
        label_range: tuple[float, float] | None = None,
        keep: list[str] | None = None,
        grow: bool = False,
    ) -> None:
        """Set where rows are, and what is made of them. A subclass may set tables as `sources` in
        its setup.

        Args:
            train: a path or a list: files, globs or folders of .parquet, .csv, .tsv, .txt, also
                .gz; local, or URLs (s3://, gs://, ...) that pyarrow or fsspec reads.
                In a script also a DataFrame (pandas, polars) or a pyarrow Table.
            features: name -> a feature with its kind: hash, vocabulary, bucketize, number, time,
                age, vector or cross.
            label: a column of numbers, or several.
            val: as train; or the share of the training rows that validates: the last ones, but for
                those that test.
            test: as train; or the share of the training rows, the last ones, that tests.
            predict: as train; its labels are not read.
            form: "jagged" for TorchRec's collections and nn.EmbeddingBag, "padded" for
                nn.Embedding.
            batch_size: rows per rank and step.
            buffer_rows: rows that are shuffled with each other. They are held encoded, 4 bytes an
                id, twice for each worker.
            seed: of the order of rows; each epoch has another one.
            num_workers: threads that read and encode ahead of the batches; 0: rows are read when a
                batch needs them.
            pin_memory: copy batches into pinned memory; null: where CUDA is available.
            cache_dir: where text files are kept as Parquet, and what was fitted.
            delimiter: between the values of text files.
            column_names: of text files without a header.
            label_range: the lowest and the highest label; another one is an error before training.
                For clicks [0, 1].
            keep: columns of `predict` that PredictionWriter writes beside predictions.
            grow: where a fit loads a checkpoint, of older data, give values that are new in `train`
                rows of their own, and retire others where rows are full. Else they are unknown.
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
        self.grow = grow
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
        self._fitted_columns = self.columns

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
            self.fit_features()

    def fit_features(self, client: Any = None) -> Path:
        """Do what `prepare_data` does, and return the file that `setup` takes; nothing is done
        again.

        client: a distributed.Client, whose workers see the same files; None: this process, or local
        workers for much data. Raises DataError: a file, a column or its type does not fit.
        """
        if self._is_in_memory:
            raise ConfigError("data in memory is fitted by setup, in each process. Name files.")
        path = self._prepared_path()
        if path.exists() and "error" not in json.loads(path.read_text()):
            return path
        try:
            prepared = self._prepare(client)
        except DataError as error:
            replace_file(path, json.dumps({"error": str(error)}).encode())
            raise
        replace_file(path, json.dumps(prepared).encode())
        return path

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
            self.columns = self._fitted_columns = Columns.from_plain(prepared["columns"])

    def _prepared_path(self) -> Path:
        """Return where the result of `prepare_data` is, a name that changes with files and
        settings."""
        files = {}
        for stage, source in self.sources.items():
            files[stage] = find_files(_paths(source)) if _is_paths(source) else source
        features = {name: feature.plain(name) for name, feature in self.columns.features.items()}
        for name, feature in self.columns.features.items():
            file = getattr(feature, "file", None)
            features[name]["from"] = (
                find_files([file]) if file else getattr(feature, "moments", None)
            )
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

    def _prepare(self, client: Any = None) -> dict[str, Any]:
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
                groups["train"], groups[stage] = split_groups(groups["train"], remaining)
        for stage, part in groups.items():
            if not part:
                raise DataError(f"{stage}: there are no rows. Shares are of {total} training rows.")
        self.readers = {stage: self._reader(stage, groups[stage]) for stage in groups}
        plain = None
        if "train" in groups:
            plain = self._fitted(groups["train"], client).to_plain()
        return {"groups": groups, "columns": plain}

    def _fitted(self, groups: list[RowGroup], client: Any) -> Columns:
        reader: Any = self.readers["train"]
        if client is not None:
            return fit_on(client, self.columns, reader, groups)
        if not self._is_in_memory and is_large(self.columns, groups):
            with connected(None) as local:
                return fit_on(local, self.columns, reader, groups)
        place = ""

        def tables() -> Iterator[pa.Table]:
            nonlocal place
            for group in groups:
                place = group.place()
                yield reader.read(group, self.columns.columns)

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
        label = None if stage == "predict" else self.columns.label
        columns = Columns(self.columns.features, label, self.columns.form)
        if not _is_paths(source):
            place = f"the table of {stage}"
            reader = TableReader(table_of(source))
            self.readers[stage] = reader
            columns.check_schema(reader.table.schema, place, keep)
            groups = reader.groups()
            self._check_labels(columns.labels, place, reader, groups)
        else:
            texts = [*columns.text_columns, *keep]
            names = [*columns.columns, *keep]
            types = {name: pa.string() if name in texts else pa.float64() for name in names}
            for entry in find_files(_paths(source)):
                file = entry[0]
                is_text = not file.endswith(".parquet")
                text = (self.cache_dir, self.column_names, self.delimiter, types)
                path = as_parquet(entry, *text) if is_text else file
                schema, file_groups = parquet_schema(path, is_ours=is_text)
                columns.check_schema(schema, file, keep)
                if not groups:
                    first = schema
                check_fields(names, schema, first, file)
                labels = ParquetReader({
                    column: schema.field(column).type for column in columns.labels
                })
                self._check_labels(columns.labels, file, labels, file_groups)
                groups += file_groups
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
        trainer: Any = self.trainer
        is_fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self.grow and is_fitting and "is_grown" not in state_dict:
            raise ConfigError(
                f"grow=True: {type(trainer.strategy).__name__} cannot give rows of tables to other "
                "values. Use a strategy of lightning_distrec, or set grow=False."
            )
        for name in {**columns.features, **self.columns.features}:
            plain = []
            for c in (columns, self.columns):
                plain.append(c.features[name].plain(name) if name in c.features else None)
            if plain[0] != plain[1]:
                raise other_feature(name, "or, to train on newer data, grow=True")
        self.columns = columns
        if trainer is not None:
            _TRAINED[trainer.lightning_module] = columns

    def grown(self, state_dict: dict[str, Any]) -> Growth:
        """Return the features as they were fitted on this data, merged with those of a checkpoint;
        for strategies. Raises ConfigError: they do not fit."""
        return grown(Columns.from_plain(state_dict["columns"]), self._fitted_columns)

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
        self._check_module(trains=shuffle)
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
        loader = RowLoader(
            EncodedRows(self.readers[stage], groups, self.columns, order, names),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        reader = self.readers[stage]
        if isinstance(reader, TableReader):
            rows = np.linspace(0, reader.table.num_rows - 1, 200).astype(np.int64)
            loader.source = str(reader.table.take(np.unique(rows)).to_pylist())
        else:
            # Neither folders nor times, which change where files are copied.
            sizes = {}
            for group in groups:
                sizes[Path(group.file).name] = (group.version or "").partition(" ")[0]
            loader.source = str(sizes)
        return loader

    def _check_module(self, *, trains: bool) -> None:
        """Raise ConfigError: the trainer's module was trained on rows that were mapped
        otherwise."""
        trainer: Any = self.trainer
        if trainer is None:
            return
        module = trainer.lightning_module
        trained = _TRAINED.get(module, self.columns)
        if trained is not self.columns and trainer.ckpt_path is None:
            check_same(trained, self.columns)
        if trains:
            _TRAINED[module] = self.columns

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
            maps = [field.name for field in table.schema if pa.types.is_map(field.type)]
            for row in table.to_pylist():
                for column in maps:
                    row[column] = None if row[column] is None else dict(row[column])
                rows.append(_plain(row))
            if len(rows) == count:
                break
        return rows


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN is missing, a decimal a number, and a time its ISO
    text."""
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
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
