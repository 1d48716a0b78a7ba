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
    errors_at,
    flat_values,
    is_number,
    numbers_of,
    rounded_types,
    statistics_for,
    type_problem,
)
from lightning_distrec.data.features import (
    Bucketize,
    Feature,
    Number,
    TableFeature,
    Vocabulary,
    feature_of,
)
from lightning_distrec.data.raw_values import Encoded, Encoder
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
    features; a number feature of sequences has its own name, (batch_size, max_length) float32;
    "label" float32, (batch_size,) or (batch_size, labels)
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
        self._check_groups()
        self.tables = self._tables()
        self._readers = self._columns_with_readers()
        self._encoder: Encoder | None = None

    def _check_groups(self) -> None:
        groups: set[Any] = {
            getattr(feature, "group", None) for feature in self.features.values()
        } - {None}
        others = {
            name for name, feature in self.features.items() if not isinstance(feature, TableFeature)
        }
        if groups and (self.form == "padded" or groups & {"dense", "label", *others}):
            raise ConfigError(
                f"features: group={', '.join(sorted(groups))}: groups are KeyedJaggedTensors of "
                "form='jagged', and have names that nothing else in the batch has."
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
        for name, feature in self.features.items():
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
        return list(dict.fromkeys([*self._readers, *self.labels]))

    @property
    def text_columns(self) -> list[str]:
        """The columns whose values are read as text."""
        columns = []
        for column, feature in self._readers.items():
            if not feature.is_numeric or feature.is_time or feature.separator:
                columns.append(column)
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

        Memory: a count for each different value of a vocabulary, and 8 MiB for each bucketized
        column. Only the first table is read where there is nothing to take. Raises DataError: a
        column is missing or does not fit, no data.
        """
        schema: pa.Schema | None = None
        # By kind, too: a table may have the name of a number.
        keys = {
            name: (feature.kind, getattr(feature, "table", name))
            for name, feature in self.features.items()
        }
        made = {keys[name]: statistics_for(feature) for name, feature in self.features.items()}
        statistics: dict[tuple[str, str], Any] = {
            key: statistic for key, statistic in made.items() if statistic
        }
        for table in tables:
            if schema is None:
                schema = table.schema
                self.check_schema(schema)
            if not statistics:
                break
            for name, feature in self.features.items():
                column = feature.columns(name)[0]
                if keys[name] in statistics:
                    with errors_at(f"column '{column}': "):
                        statistics[keys[name]].add(flat_values(table[column], feature)[0])
        if schema is None:
            raise DataError("there is no data to fit features on.")
        vocabularies = {}
        boundaries = {}
        moments = {}
        for name, feature in self.features.items():
            statistic: Any = statistics.get(keys[name])
            if isinstance(feature, Vocabulary) and feature.table not in vocabularies:
                vocabularies[feature.table] = statistic.top_values(
                    feature.rows - 1, feature.min_count
                )
            elif isinstance(feature, Bucketize):
                boundaries[name] = (
                    statistic.quantiles(feature.quantiles)
                    if statistic
                    else list(feature.boundaries)
                )
            elif isinstance(feature, Number) and statistic:
                moments[name] = statistic.moments()
        plain = {
            "features": {name: feature.plain(name) for name, feature in self.features.items()},
            "label": self.label,
            "form": self.form,
            "rounded": rounded_types(schema),
            "vocabularies": vocabularies,
            "boundaries": boundaries,
            "moments": moments,
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
        features = {name: plain["features"][name] for name in columns.features}
        columns._encoder = Encoder({
            **plain,
            "features": features,
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
            kind = schema.field(column).type
            feature = self._readers.get(column)
            problem = type_problem(kind, feature) if feature else None
            if problem is None and column in self.labels and not is_number(kind):
                problem = "a label is a number"
            if problem is not None:
                raise DataError(f"{place}: column '{column}' has the type {kind}: {problem}.")

    def encode(self, table: pa.Table) -> dict[str, Encoded]:
        """Return the features of a table, and its label where the table has it. Raises DataError
        with the column."""
        cells = {}
        for column, feature in self._readers.items():
            with errors_at(f"column '{column}': "):
                cells[column] = cells_of(table[column], feature)
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
            batch[group] = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
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
        missing = [column for column in self._readers if column not in table.column_names]
        if missing:
            raise DataError(
                f"there is no column '{missing[0]}', but {', '.join(table.column_names)}."
            )
        return self.batch(self.tensors(self.encode(table), table.num_rows))
