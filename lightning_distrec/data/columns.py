"""From columns to batches: fitted once on the training data, then the same in training and in
serving."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from lightning_distrec.data.arrow_columns import (
    cells_of,
    column_in,
    errors_at,
    flat_values,
    is_number,
    numbers_of,
    rounded_types,
    type_problem,
)
from lightning_distrec.data.features import (
    Bucketize,
    Feature,
    Number,
    TableFeature,
    Time,
    Vocabulary,
    feature_of,
)
from lightning_distrec.data.raw_values import Encoded, Encoder
from lightning_distrec.data.statistics import Key, Statistic, statistic_for
from lightning_distrec.data.time_zones import offsets_in
from lightning_distrec.data.vocabulary_files import read_vocabulary
from lightning_distrec.errors import ConfigError, DataError

Form = Literal["jagged", "padded"]


@dataclass(frozen=True, kw_only=True)
class FeatureTable:
    """An embedding table that features are looked up in."""

    rows: int
    features: tuple[str, ...]


class Columns:
    """The mapping from columns to the tensors of a batch.

    A batch is a dict. `form="jagged"`: "ids" is a KeyedJaggedTensor with a key for each feature
    that has a table, in order; features with a `group` are in a KeyedJaggedTensor of its name.
    "padded": each such feature's name -> ids, (batch_size,), or (batch_size, max_length) of
    sequences, filled up with 0. Both: "dense" (batch_size, numbers) float32, in the order of number
    features, of which a vector has `size` columns; a number feature of sequences has its own name,
    (batch_size, max_length) float32; "label" float32, (batch_size,) or (batch_size, labels).
    Weights are those of their KeyedJaggedTensor, or padded under `<name>.weights`.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        label: str | Sequence[str] | None = None,
        form: Form = "jagged",
    ) -> None:
        """Check the features; nothing is read.

        features: name -> Feature, or its dict with `kind`. label: columns of numbers; None: there
        are no labels. Raises ConfigError: a feature cannot be, or features of one table disagree
        about its rows.
        """
        self.features: dict[str, Feature] = {
            name: feature_of(name, feature) for name, feature in features.items()
        }
        self.label = label if label is None or isinstance(label, str) else list(label)
        self.labels = [label] if isinstance(label, str) else list(label or ())
        self.form = form
        if form not in ("jagged", "padded"):
            raise ConfigError(f"form={form!r}: use 'jagged' or 'padded'.")
        if not self.features or {"ids", "dense", "label"} & self.features.keys():
            raise ConfigError(
                "features: name one or more; the names ids, dense and label are those of the batch."
            )
        self.weights = self._weights()
        self._check_groups()
        self.tables = self._tables()
        self._readers = self._columns_with_readers()
        self._encoder: Encoder | None = None

    def _weights(self) -> dict[str, Number]:
        """Return the weights of sequences, which are sequences of numbers that are read alike."""
        weights = {}
        for name, feature in self.features.items():
            column = getattr(feature, "weights", None)
            if column is not None:
                weights[f"{name}.weights"] = Number(
                    column=column,
                    max_length=feature.max_length,
                    separator=feature.separator,
                    required=True,
                )
        return weights

    def _check_groups(self) -> None:
        groups: dict[str, set[bool]] = {}
        numbers = ["dense", "label"]
        for name, feature in self.features.items():
            if isinstance(feature, TableFeature):
                groups.setdefault(feature.group or "ids", set()).add(feature.weights is None)
            else:
                numbers.append(name)
        is_padded = self.form == "padded"
        # A group has parts, such as ids.values.
        has_clash = any(name.partition(".")[0] in groups for name in numbers)
        if (
            has_clash
            or self.weights.keys() & self.features
            or is_padded
            and groups.keys() - {"ids"}
        ):
            raise ConfigError(
                f"features: group={', '.join(sorted(groups))}: groups are KeyedJaggedTensors of "
                "form='jagged', and they, their parts and weights have names that nothing else in "
                "the batch has."
            )
        if is_padded:
            return
        for group, kinds in groups.items():
            if len(kinds) > 1:
                raise ConfigError(
                    f"features: some of '{group}' have weights, and a KeyedJaggedTensor has them "
                    "for all of its features or for none. Set group for those that have weights."
                )

    def _tables(self) -> dict[str, FeatureTable]:
        names_by_table: dict[str, list[str]] = {}
        for name, feature in self.features.items():
            if isinstance(feature, TableFeature):
                names_by_table.setdefault(feature.table or name, []).append(name)
        tables = {}
        for table, names in names_by_table.items():
            first = self.features[names[0]]
            assert isinstance(first, TableFeature)
            if len({self.features[name].mapping() for name in names}) > 1:
                raise ConfigError(
                    f"features {', '.join(names)} share the table '{table}', and differ in kind, "
                    "rows, seed, min_count, boundaries, quantiles, part or group. Give them the "
                    "same, or tables of their own."
                )
            tables[table] = FeatureTable(rows=first.num_rows(), features=tuple(names))
        return tables

    def _columns_with_readers(self) -> dict[str, Feature]:
        readers: dict[str, tuple[str, Feature]] = {}
        for name, feature in {**self.features, **self.weights}.items():
            for column in feature.columns(name):
                first_name, first = readers.setdefault(column, (name, feature))
                if first.reading() != feature.reading():
                    raise ConfigError(
                        f"features '{first_name}' and '{name}' read the column '{column}' in two "
                        "ways: as text and as number, or with different max_length or separator. "
                        "Copy it under another name."
                    )
        return {column: feature for column, (_, feature) in readers.items()}

    @property
    def columns(self) -> list[str]:
        """The columns of features and labels, each once."""
        return list(dict.fromkeys([*self._sources(), *self.labels]))

    def _sources(self) -> list[str]:
        columns = []
        for name, feature in {**self.features, **self.weights}.items():
            columns += feature.sources(name)
        return columns

    @property
    def text_columns(self) -> list[str]:
        """The columns whose values are read as text."""
        columns = []
        for column, feature in self._readers.items():
            if not feature.is_numeric or feature.is_time or feature.separator:
                columns += feature.sources(column)
        return columns

    @property
    def encoder(self) -> Encoder:
        """The fitted mapping. Raises ConfigError: not fitted yet."""
        if self._encoder is None:
            raise ConfigError(
                "these Columns are not fitted. Call fit, or setup of their data module."
            )
        return self._encoder

    def fit(self, tables: Iterable[pa.Table]) -> "Columns":
        """Take vocabularies, quantiles and moments from tables with all columns, in one pass;
        return self.

        Memory: a count for each different value of a vocabulary, 16 MiB for each column with
        quantiles. Only the first table is read where nothing is taken. Raises DataError: a column
        is missing or does not fit, no data.
        """
        results = self.vocabularies_of_files()
        schema: pa.Schema | None = None
        statistics = self.statistics()
        for number, table in enumerate(tables):
            if schema is None:
                schema = table.schema
                self.check_schema(schema)
            if not statistics:
                break
            for statistic in statistics.values():
                statistic.add(table, number)
        if schema is None:
            raise DataError("there is no data to fit features on.")
        results |= {key: statistic.result() for key, statistic in statistics.items()}
        return self.take(schema, results)

    def vocabularies_of_files(self) -> dict[Key, list[Any]]:
        """Return what features take from files, as results of `statistics`. Raises DataError: a
        file does not fit."""
        results: dict[Key, list[Any]] = {}
        for table, about in self.tables.items():
            feature = self.features[about.features[0]]
            if isinstance(feature, Vocabulary) and feature.file is not None:
                results[feature.kind, table] = read_vocabulary(feature)
        return results

    def statistics(self) -> dict[Key, Statistic]:
        """Return what `fit` counts: one for each vocabulary, and for each feature with quantiles or
        moments."""
        statistics: dict[Key, Statistic] = {}
        for name, feature in self.features.items():
            statistic = statistic_for(feature)
            if statistic is not None:
                statistic = statistics.setdefault(_key(name, feature), statistic)
                statistic.columns[feature.columns(name)[0]] = feature
        return statistics

    def take(self, schema: pa.Schema, results: Mapping[Key, list[Any]]) -> "Columns":
        """Take the results of `statistics`, and `vocabularies_of_files`, as what the features are
        fitted on; return self. schema: of the training data."""
        schema = self.with_lookups(schema)
        vocabularies = {}
        boundaries = {}
        moments = {}
        zones = {}
        for name, feature in self.features.items():
            result = results.get(_key(name, feature))
            if isinstance(feature, Vocabulary):
                vocabularies[feature.table] = result
            elif isinstance(feature, Bucketize):
                boundaries[name] = list(feature.boundaries) if result is None else result
            elif isinstance(feature, Number) and feature.standardize:
                moments[name] = list(feature.moments or ()) if result is None else result
            elif isinstance(feature, Time):
                zones[feature.zone] = offsets_in(feature.zone)
        plain = {
            "features": _plain(self.features),
            "weights": _plain(self.weights),
            "label": self.label,
            "form": self.form,
            "rounded": rounded_types(schema),
            "vocabularies": vocabularies,
            "boundaries": boundaries,
            "moments": moments,
            "zones": zones,
        }
        with errors_at("vocabulary: "):
            self._encoder = Encoder(plain)
        return self

    def to_plain(self) -> dict[str, Any]:
        """Return what `from_plain` makes the same mapping of, as JSON has it. Raises ConfigError:
        not fitted yet."""
        return self.encoder.plain

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "Columns":
        """Return the mapping that `to_plain` has described."""
        columns = Columns(plain["features"], plain["label"], plain["form"])
        columns._encoder = Encoder(plain)
        return columns

    def select(self, names: Iterable[str]) -> "Columns":
        """Return the mapping of these features alone, without labels: of films without people,
        say."""
        columns = Columns({name: self.features[name] for name in names}, form=self.form)
        plain = self.to_plain()
        vocabularies = {}
        for table in columns.tables.keys() & plain["vocabularies"]:
            vocabularies[table] = plain["vocabularies"][table]
        columns._encoder = Encoder({
            **plain,
            "features": _plain(columns.features),
            "weights": _plain(columns.weights),
            "label": None,
            "vocabularies": vocabularies,
        })
        return columns

    def check_schema(
        self, schema: pa.Schema, place: str = "the data", others: Sequence[str] = ()
    ) -> None:
        """Raise DataError where a column is missing in `place`, or has a type that its feature
        cannot read.

        others: columns that are there, too.
        """
        for column in [*self.columns, *others]:
            if column not in schema.names:
                raise DataError(
                    f"{place}: there is no column '{column}', but {', '.join(schema.names[:20])}."
                )
            if schema.names.count(column) > 1:
                raise DataError(
                    f"{place}: several columns have the name '{column}'. Rename all but one."
                )
        with errors_at(f"{place}: "):
            schema = self.with_lookups(schema)
        for column in dict.fromkeys([*self._readers, *self.labels]):
            kind = schema.field(column).type
            feature = self._readers.get(column)
            problem = type_problem(kind, feature) if feature else None
            if problem is None and column in self.labels and not is_number(kind):
                problem = "a label is a number"
            if problem is not None:
                raise DataError(f"{place}: column '{column}' has the type {kind}: {problem}.")

    def with_lookups(self, schema: pa.Schema) -> pa.Schema:
        """Return a schema with the values that features look up by a key, as columns `map[key]`."""
        table = schema.empty_table()
        for column, feature in self._readers.items():
            if feature.key is not None:
                with errors_at(f"column '{column}': "):
                    kind = column_in(table, column, feature).type
                schema = schema.append(pa.field(column, kind))
        return schema

    def encode(self, table: pa.Table) -> dict[str, Encoded]:
        """Return the features of a table, and its label where the table has it. Raises DataError
        with the column."""
        cells = {}
        for column, feature in self._readers.items():
            with errors_at(f"column '{column}': "):
                cells[column] = cells_of(column_in(table, column, feature), feature)
        with errors_at(""):
            encoded = self.encoder.encode(cells)
        if self.labels and all(label in table.column_names for label in self.labels):
            labels = np.stack([self._label(table, column) for column in self.labels], axis=1)
            if isinstance(self.label, str):
                labels = labels[:, 0]
            encoded["label"] = Encoded(labels, None)
        return encoded

    def _label(self, table: pa.Table, column: str) -> np.ndarray:
        with errors_at(f"column '{column}': "), np.errstate(over="ignore"):
            numbers = numbers_of(flat_values(table[column], Number())[0]).astype(np.float32)
            rows = np.flatnonzero(~np.isfinite(numbers))
            if len(rows):
                raise ValueError(
                    f"a label is missing, or not finite in 32 bits, the first in row {rows[0]}"
                )
        return numbers

    def tensors(self, encoded: dict[str, Encoded], num_rows: int) -> dict[str, torch.Tensor]:
        """Return encoded features as the tensors that `batch` makes a batch of."""
        features = {name: feature for name, feature in encoded.items() if name != "label"}
        arrays = self.encoder.arrays(features, num_rows)
        if "label" in encoded:
            arrays["label"] = encoded["label"].values
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
        }

    def batch(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return tensors as a batch; see the class."""
        if self.form == "padded" or not self.tables:
            return tensors
        from torchrec import KeyedJaggedTensor

        batch: dict[str, Any] = {}
        for group, keys in self.encoder.groups.items():
            values = tensors.pop(f"{group}.values")
            lengths = tensors.pop(f"{group}.lengths")
            weights = tensors.pop(f"{group}.weights", None)
            batch[group] = KeyedJaggedTensor(
                keys,
                values,
                weights,
                lengths,
            )
        return {**batch, **tensors}

    def __call__(self, rows: pa.Table | Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the batch of a table, or of lists by column. Raises DataError: a column is missing
        or does not fit."""
        try:
            table = (
                rows
                if isinstance(rows, pa.Table)
                else pa.table({name: pa.array(rows[name]) for name in rows})
            )
        except pa.ArrowException as error:
            raise DataError(f"rows: {error}") from error
        missing = [column for column in self._sources() if column not in table.column_names]
        if missing:
            raise DataError(
                f"there is no column '{missing[0]}', but {', '.join(table.column_names)}."
            )
        return self.batch(self.tensors(self.encode(table), table.num_rows))


def _key(name: str, feature: Feature) -> Key:
    # By kind, too: a table may have the name of a number.
    return feature.kind, getattr(feature, "table", None) or name


def _plain(features: Mapping[str, Feature]) -> dict[str, dict[str, Any]]:
    return {name: feature.plain(name) for name, feature in features.items()}
