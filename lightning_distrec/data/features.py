"""What a feature is made of, in plain types: each is a frozen dataclass, and a dict with its `kind`
in YAML."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from lightning_distrec.data.raw_values import AGE_UNITS, TIME_PARTS, seconds_of
from lightning_distrec.data.time_zones import zone_of
from lightning_distrec.errors import ConfigError, did_you_mean

MAX_ROWS = 2**32
FITTED = ("file", "moments")
"""Settings that stand for what is fitted on the training data, and are no part of the feature."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What all kinds have. Row 0 of each table is that of values which are missing or unknown."""

    kind: ClassVar[str]

    column: str | None = None
    """Where the values are; None: in the column of the feature's name."""
    max_length: int | None = None
    """For a column of sequences: how many of the last values are used. None: the column has one
    value in each row."""
    separator: str | None = None
    """What is between the values of a sequence that is a text; None: sequences are lists."""
    key: str | None = None
    """For a column of maps: the column of the key whose value in the row's map is used. None: the
    column has the values themselves."""
    required: bool = False
    """Whether a missing value is an error."""

    def __post_init__(self) -> None:
        missing = getattr(self, "missing", 0.0)
        if not math.isfinite(missing):
            raise ConfigError(f"missing={missing}: it stands in batches, and must be finite.")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length}: a sequence needs at least 1 value.")
        if self.key is not None and self.max_length is not None:
            raise ConfigError(f"key={self.key!r}: a map has one value by key. Omit max_length.")
        if self.separator is not None and (self.max_length is None or not self.separator):
            raise ConfigError(
                f"separator={self.separator!r}: it is a text for sequences; set max_length too."
            )

    def plain(self, name: str) -> dict[str, Any]:
        """Return all fields as JSON has them, with `kind`, `columns` and `sources`."""
        plain = {"kind": self.kind, "columns": self.columns(name), **asdict(self)}
        plain["sources"] = self.sources(name)
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in plain.items()
            if key not in FITTED
        }

    def columns(self, name: str) -> list[str]:
        """Return the columns that the feature `name` is made of, as its cells are named."""
        column = self.column or name
        return [column if self.key is None else f"{column}[{self.key}]"]

    def sources(self, name: str) -> list[str]:
        """Return the columns of data that `columns` are taken from."""
        return self.columns(name) if self.key is None else [self.column or name, self.key]

    @property
    def is_numeric(self) -> bool:
        """Whether values are numbers; else they are texts."""
        return isinstance(self, (Bucketize, Number, Time, Vector))

    @property
    def is_time(self) -> bool:
        """Whether values are times, which are read as seconds since 1970 in UTC."""
        return isinstance(self, (Age, Time))

    def mapping(self) -> tuple[Any, ...]:
        """Return what features of one table have in common."""
        plain = self.plain("")
        shared = (
            "kind",
            "rows",
            "seed",
            "min_count",
            "boundaries",
            "quantiles",
            "part",
            "group",
            "zone",
        )
        return *(str(plain.get(setting)) for setting in shared), getattr(self, "file", None)

    def reading(self) -> tuple[Any, ...]:
        """Return how its column is read, which features of one column share."""
        return self.is_numeric, self.is_time, self.max_length, self.separator, self.key


@dataclass(frozen=True, kw_only=True)
class TableFeature(Feature):
    """A feature whose ids are rows of an embedding table."""

    table: str | None = None
    """The embedding table; features of one table share its rows. None: a table of the feature's
    name."""
    group: str | None = None
    """The KeyedJaggedTensor of the batch that has its ids; None: "ids"."""
    weights: str | None = None
    """For sequences: the column with a weight for each value. None: values have no weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None and self.max_length is None:
            raise ConfigError(
                f"weights={self.weights!r}: they are those of a sequence's values; set max_length "
                "too."
            )

    def num_rows(self) -> int:
        """Return how many rows the table needs."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SizedFeature(TableFeature):
    """A feature whose number of rows is set."""

    rows: int
    """Rows of the table, that of missing and unknown values included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.rows <= MAX_ROWS:
            raise ConfigError(
                f"rows={self.rows}: a table needs 2 to {MAX_ROWS} rows, the first of them for "
                "missing values."
            )

    def num_rows(self) -> int:
        """Return how many rows the table needs."""
        return self.rows


@dataclass(frozen=True, kw_only=True)
class Hash(SizedFeature):
    """Rows by a stable hash: several values may share a row."""

    kind = "hash"

    seed: int = 0
    """Another seed, other values that share rows."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary(SizedFeature):
    """A row for each of the training data's most frequent values; all others are unknown.

    Its number of rows is fixed, so that a model can be built before data is read.
    """

    kind = "vocabulary"

    min_count: int = 1
    """How often a value must occur."""
    file: str | None = None
    """Where the values are, in place of the training data: .parquet, or .csv with a header, with
    the column `value`, and `count` where the most frequent ones are used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file is not None and not str(self.file).endswith((".parquet", ".csv")):
            raise ConfigError(f"file={self.file}: the name must end in .parquet or .csv.")


@dataclass(frozen=True, kw_only=True)
class Bucketize(TableFeature):
    """Ranges of numbers; a bucket begins at its boundary."""

    kind = "bucketize"

    boundaries: tuple[float, ...] = ()
    """Ascending; or a JSON file with a list of them."""
    quantiles: int | None = None
    """In place of boundaries: this many buckets, of about as many training rows each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "boundaries", _numbers_of("boundaries", self.boundaries))
        if bool(self.boundaries) == (self.quantiles is not None) or list(self.boundaries) != sorted(
            set(self.boundaries)
        ):
            raise ConfigError(
                f"bucketize: boundaries={list(self.boundaries)}, quantiles={self.quantiles}: set "
                "one of them; boundaries ascend."
            )
        if self.quantiles is not None and self.quantiles < 2:
            raise ConfigError(f"bucketize: quantiles={self.quantiles}: there must be at least 2.")

    def num_rows(self) -> int:
        """Return how many rows the table needs."""
        return 2 + len(self.boundaries) if self.quantiles is None else 1 + self.quantiles


@dataclass(frozen=True, kw_only=True)
class Time(TableFeature):
    """A part of a time: its hour, weekday, day of the month or month, of timestamps, dates, ISO
    texts or seconds."""

    kind = "time"

    part: str
    """hour, weekday (Monday first), day or month."""
    zone: str = "UTC"
    """The time zone that the part is of, by its IANA name: Europe/Zurich."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part not in TIME_PARTS:
            raise ConfigError(
                f"time: part={self.part!r}: use one of {', '.join(TIME_PARTS)}, or the kind age."
            )
        zone_of(self.zone)

    def num_rows(self) -> int:
        """Return how many rows the table needs."""
        return 1 + TIME_PARTS[self.part]


@dataclass(frozen=True, kw_only=True)
class Number(Feature):
    """A number for the dense part of a batch."""

    kind = "number"

    log: bool = False
    """Take log(1 + x); of negative numbers, 0."""
    standardize: bool = False
    """Then subtract the training data's mean, and divide by its standard deviation."""
    moments: tuple[float, ...] | None = None
    """The mean and the standard deviation, in place of the training data's; or a JSON file with a
    list of both."""
    missing: float = 0.0
    """What a missing number is in the batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moments is None:
            return
        moments = _numbers_of("moments", self.moments)
        object.__setattr__(self, "moments", moments)
        if not self.standardize or len(moments) != 2 or not moments[1] > 0:
            raise ConfigError(
                f"moments={list(moments)}: set standardize=true, and a mean and a standard "
                "deviation above 0."
            )


@dataclass(frozen=True, kw_only=True)
class Age(Number):
    """The time that has passed until another one, as a number of units."""

    kind = "age"

    until: str
    """The other time, as an ISO text; without an offset it is in UTC."""
    unit: str = "seconds"
    """seconds, minutes, hours or days."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            seconds_of(self.until)
        except ValueError as error:
            raise ConfigError(f"age: until={self.until!r} is no time: {error}") from None
        if self.unit not in AGE_UNITS:
            raise ConfigError(f"age: unit={self.unit!r}: use one of {', '.join(AGE_UNITS)}.")


@dataclass(frozen=True, kw_only=True)
class Vector(Feature):
    """Lists of as many numbers each, for the dense part of a batch."""

    kind = "vector"

    size: int
    """How many numbers a list has: as many columns of the dense part."""
    missing: float = 0.0
    """What all numbers of a missing or empty list are."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.max_length not in (None, self.size) or self.key is not None:
            raise ConfigError(
                f"vector: size={self.size}: set 1 number or more, and neither max_length nor key."
            )
        object.__setattr__(self, "max_length", self.size)  # it is read as a sequence
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Cross(Hash):
    """Rows by a hash of several columns' values together; missing where one of them is."""

    kind = "cross"

    of: tuple[str, ...] = field(default=())
    """The columns: two or more, of one value in each row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "of", tuple(self.of))
        if len(self.of) < 2 or self.column or self.max_length or self.key:
            raise ConfigError(
                f"cross: of={list(self.of)}: name two or more columns, and neither column, "
                "max_length nor key."
            )

    def columns(self, name: str) -> list[str]:
        """Return the columns that are crossed."""
        return list(self.of)


KINDS: dict[str, type[Feature]] = {
    kind.kind: kind for kind in (Hash, Vocabulary, Bucketize, Number, Time, Age, Vector, Cross)
}


def _numbers_of(setting: str, numbers: Any) -> tuple[float, ...]:
    """Return numbers of a list, or of a JSON file with one. Raises ConfigError: they are none."""
    try:
        if isinstance(numbers, str):
            numbers = json.loads(Path(numbers).read_text())
        finite = tuple(map(float, numbers))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{setting}={numbers!r}: it is no list of numbers: {error}") from error
    if not all(map(math.isfinite, finite)):
        raise ConfigError(f"{setting}={list(finite)}: numbers must be finite.")
    return finite


def feature_of(name: str, feature: Any) -> Feature:
    """Return a feature, which may be a dict, with its table's name. Raises ConfigError with the
    feature's name."""
    if isinstance(feature, Feature):
        if isinstance(feature, TableFeature) and not feature.table:
            feature = replace(feature, table=name)
        return replace(feature, column=feature.column or name) if feature.key else feature
    if not isinstance(feature, Mapping):
        raise ConfigError(
            f"features: '{name}' is {feature!r}: write a dict such as {{kind: hash, rows: 1000}}."
        )
    settings = dict(feature)
    kind = settings.pop("kind", None)
    for setting in ("columns", "sources"):
        settings.pop(setting, None)  # of to_plain
    if kind not in KINDS:
        raise ConfigError(
            f"features: '{name}' has kind={kind!r}: use one of "
            f"{', '.join(KINDS)}{did_you_mean(str(kind), KINDS)}"
        )
    accepted = {field.name: field for field in fields(KINDS[kind])}
    for setting in settings:
        if setting not in accepted:
            raise ConfigError(
                f"features: '{name}' ({kind}) has no '{setting}'{did_you_mean(setting, accepted)}"
            )
    for setting, about in accepted.items():
        if about.default is MISSING and setting not in settings:
            raise ConfigError(f"features: '{name}' ({kind}) needs '{setting}'.")
        value = settings.get(setting, about.default)
        types: Any = float | int if about.type is float else about.type
        # What a list is made of is checked where it is used.
        if "tuple" not in str(types) and not isinstance(value, types):
            raise ConfigError(
                f"features: '{name}' ({kind}): {setting}={value!r} must be of the type "
                f"{getattr(types, '__name__', types)}."
            )
    try:
        return feature_of(name, KINDS[kind](**settings))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"features: '{name}': {error}") from None
