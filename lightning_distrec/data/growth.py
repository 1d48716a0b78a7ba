"""Newer data for a model that is trained: what is known keeps its row, and what is new gets one."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lightning_distrec.data.columns import Columns
from lightning_distrec.data.features import Feature, Vocabulary
from lightning_distrec.data.raw_values import UNKNOWN
from lightning_distrec.errors import ConfigError


class TableGrowth(NamedTuple):
    """Which values the rows of a table are of, compared with a checkpoint's."""

    names: set[str]
    """Of the table, and of its features."""
    rows: int
    factor: int
    """Rows that each row of the checkpoint but row 0 becomes; 1 of a vocabulary."""
    new_rows: np.ndarray
    """(num,) int64: the rows of values that the checkpoint has no row of."""
    message: str


class Growth(NamedTuple):
    """Columns fitted on newer data, merged with those of a checkpoint."""

    plain: dict[str, Any]
    """As `Columns.from_plain` takes it."""
    changed: dict[str, TableGrowth]
    """Table -> what becomes of its rows, where that is anything."""
    added: set[str]
    """Names of tables that the checkpoint has not, and of their features."""
    dropped: set[str]
    """As `added`, of tables that the checkpoint alone has."""


def grown(saved: Columns, fitted: Columns) -> Growth:
    """Merge the columns of a checkpoint with those of newer data.

    Boundaries of tables and moments of features that the checkpoint knows stay as they are there.
    Raises ConfigError: a feature is another one, or has rows that its values cannot stay in.
    """
    before = saved.to_plain()
    plain = dict(fitted.to_plain())
    for name, feature in fitted.features.items():
        known_feature = saved.features.get(name, feature)
        if _resized(known_feature, feature).plain(name) != feature.plain(name):
            raise other_feature(name, "or give it another name: with grow=True, its rows may grow")
    for part in ("moments", "zones"):
        known = before[part]
        plain[part] = {name: known.get(name, value) for name, value in plain[part].items()}
    plain["rounded"] = plain["rounded"] | before["rounded"]
    plain["vocabularies"] = dict(plain["vocabularies"])
    plain["boundaries"] = dict(plain["boundaries"])
    changed = {}
    for table in fitted.tables:
        if table not in saved.tables:
            continue
        boundaries = before["boundaries"].get(saved.tables[table].features[0])
        if boundaries is not None:
            # Of the table, whose rows are those of its ranges: a feature may be new on it.
            plain["boundaries"] |= dict.fromkeys(fitted.tables[table].features, boundaries)
        growth = _grown_table(
            table,
            saved,
            fitted,
            plain["vocabularies"],
        )
        has_more = growth.rows != saved.tables[table].rows
        if has_more or len(growth.new_rows):
            changed[table] = growth
    return Growth(
        plain,
        changed,
        _names_of_others(fitted, saved),
        _names_of_others(saved, fitted),
    )


def other_feature(name: str, ways_out: str) -> ConfigError:
    """Return the error of a feature that is not the one of a checkpoint."""
    return ConfigError(
        f"the checkpoint was trained with another feature '{name}'. Set features as they were, "
        f"{ways_out}."
    )


def check_same(trained: Columns, columns: Columns) -> None:
    """Raise ConfigError: both have a feature, and map it to other ids or numbers."""
    trained_plain = trained.to_plain()
    plain = columns.to_plain()
    for part in ("features", "vocabularies", "moments", "boundaries"):
        for name in sorted(trained_plain[part].keys() & plain[part].keys()):
            if trained_plain[part][name] != plain[part][name]:
                raise ConfigError(
                    f"the module was trained before, and these data map '{name}' otherwise: "
                    f"{part} differ. Give the ColumnData of that fit, or its checkpoint as "
                    "ckpt_path, with grow=True for newer data."
                )


def _names_of_others(columns: Columns, known: Columns) -> set[str]:
    names: set[str] = set()
    for table, about in columns.tables.items():
        if table not in known.tables:
            names |= {table, *about.features}
    return names


def _resized(feature: Feature, like: Feature) -> Feature:
    """Return a feature with the settings of another one that may differ from a checkpoint's."""
    settings = {}
    for name in ("rows", "min_count", "file"):
        if hasattr(feature, name) and hasattr(like, name):
            settings[name] = getattr(like, name)
    return replace(feature, **settings)


def _grown_table(
    table: str, saved: Columns, fitted: Columns, vocabularies: dict[str, list[str]]
) -> TableGrowth:
    """Return what becomes of a table's rows, and put its vocabulary's values in their order."""
    saved_table = saved.tables[table]
    about = fitted.tables[table]
    first = saved.features[saved_table.features[0]]
    feature = fitted.features[about.features[0]]
    if _resized(first, feature).mapping() != feature.mapping():
        raise other_feature(about.features[0], "or give its table another name")
    names = {table, *about.features}
    if isinstance(feature, Vocabulary):
        if about.rows < saved_table.rows:
            raise ConfigError(
                f"table '{table}': a vocabulary grows only. Set rows={saved_table.rows}, or more."
            )
        num_saved = len(saved.to_plain()["vocabularies"][table])
        values, new_rows = _merged(
            saved,
            table,
            vocabularies[table],
            about.rows,
        )
        vocabularies[table] = values
        num_retired = np.sum(new_rows <= num_saved)
        changes = f"{len(new_rows):,} new values, {num_retired:,} retired"
        message = f"{changes}, {len(values) + 1:,} of {about.rows:,} rows in use"
        return TableGrowth(
            names,
            about.rows,
            1,
            new_rows,
            message,
        )
    num_saved = saved_table.rows - 1
    factor, remainder = divmod(about.rows - 1, num_saved)
    if remainder or not factor:
        more = (factor + 1) * num_saved + 1
        raise ConfigError(
            f"table '{table}': rows={about.rows} would lead values to rows of others. Set "
            f"rows={num_saved + 1} as in the checkpoint, or {more}, by which each row becomes "
            f"{factor + 1}."
        )
    message = f"each row but the first becomes {factor}, which begin alike"
    return TableGrowth(
        names,
        about.rows,
        factor,
        np.zeros(0, dtype=np.int64),
        message,
    )


def _merged(
    saved: Columns, table: str, values: list[str], num_rows: int
) -> tuple[list[str], np.ndarray]:
    """Return a vocabulary's values by row, and the rows of those that are new in `values`.

    Free rows come first, then those of values that are not in `values`, the last one first. As
    `values` are fewer than rows, all get one.
    """
    saved_values = saved.to_plain()["vocabularies"][table]
    num_saved = len(saved_values)
    known_rows = np.array(saved.encoder.rows_of_values(table, values), dtype=np.int64)
    is_new = known_rows == UNKNOWN
    is_known = np.zeros(num_rows, dtype=bool)
    is_known[known_rows] = True
    free = np.arange(num_saved + 1, num_rows)
    last_first = np.arange(num_saved, UNKNOWN, -1)
    retired = last_first[~is_known[last_first]]
    new_rows = np.concatenate([free, retired])[: is_new.sum()]
    merged = np.empty(num_rows, dtype=object)
    merged[1 : num_saved + 1] = saved_values
    merged[new_rows] = np.array(values, dtype=object)[is_new]
    stop = 1 + max(num_saved, new_rows.max(initial=UNKNOWN))
    return merged[1:stop].tolist(), new_rows
