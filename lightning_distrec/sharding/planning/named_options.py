"""Which options each table gets: they are given by the table's name, or by a pattern of names."""

import re
from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.tables import Table

Given = Mapping[str, TableOptions | Mapping[str, Any]]
"""Options by table name, by full name (where two collections use one name), or by a pattern of either: "user_*"."""

WILD = re.compile(r"[*?\[\]]")
"""What makes a name a pattern, as in file names."""


def options_by_table(tables: list[Table], everywhere: TableOptions, given: Given) -> dict[str, TableOptions]:
    """Return the options of every table by its full name: `everywhere`, overridden by what was `given` for it.

    A later pattern overrides an earlier one, option by option, a name any pattern, and a full name a name.
    Raises ConfigError: a name that is no table's, or a pattern that fits none (with near matches); an option that does
    not exist; options that contradict each other.
    """
    parsed = _parsed(given)
    names = {name for table in tables for name in (table.name, table.full_name)}
    for name in parsed:
        if name in names or any(fnmatchcase(known, name) for known in names):
            continue
        what = f"no table fits {name!r}" if WILD.search(name) else f"there is no table {name!r}"
        raise ConfigError(
            f"tables: {what}{did_you_mean(WILD.sub('', name), names)} "
            f"The tables are {', '.join(table.full_name for table in tables) or 'none'}."
        )
    return {table.full_name: _of_table(table, everywhere, parsed) for table in tables}


def left_whole(tables: list[Table], given: Given) -> set[str]:
    """Return the collections, by path, all of whose tables have keep_whole: they are no business of planning.

    Names that are no table's are not looked at. Raises ConfigError: options that cannot be; an EmbeddingCollection of
    which only some tables are kept whole.
    """
    parsed = _parsed(given)
    whole: set[str] = set()
    for path in dict.fromkeys(table.collection for table in tables):
        mine = [table for table in tables if table.collection == path]
        kept = [table for table in mine if _of_table(table, TableOptions(), parsed).keep_whole]
        if len(kept) == len(mine):
            whole.add(path)
        elif kept and not mine[0].pooled:
            raise ConfigError(
                f"table '{kept[0].full_name}': keep_whole=True, but an EmbeddingCollection is sharded with all of its "
                f"tables or not at all. Set it for all tables of '{path}', as '{path}.*', or for none."
            )
    return whole


def _parsed(given: Given) -> dict[str, TableOptions]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"tables={given!r}: a dict from table names to options is needed.")
    return {name: _as_options(name, options) for name, options in given.items()}


def _as_options(name: str, options: TableOptions | Mapping[str, Any]) -> TableOptions:
    if isinstance(options, TableOptions):
        return options
    allowed = [field.name for field in fields(TableOptions)]
    if not isinstance(options, Mapping):
        raise ConfigError(f"tables[{name!r}]={options!r}: options are needed, some of {', '.join(allowed)}.")
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"tables[{name!r}]: there is no option {option!r}{did_you_mean(option, allowed)} "
                f"Use some of {', '.join(allowed)}."
            )
    try:
        return TableOptions(**options)
    except ConfigError as error:
        raise ConfigError(f"tables[{name!r}]: {error}") from None


def _of_table(table: Table, everywhere: TableOptions, parsed: Mapping[str, TableOptions]) -> TableOptions:
    names = (table.name, table.full_name)
    fitting = [
        options
        for pattern, options in parsed.items()
        if pattern not in names and any(fnmatchcase(name, pattern) for name in names)
    ]
    exact = [parsed[name] for name in dict.fromkeys(names) if name in parsed]
    try:
        return _merged([everywhere, *fitting, *exact])
    except ConfigError as error:
        raise ConfigError(f"table '{table.full_name}': {error}") from None


def _merged(layers: list[TableOptions]) -> TableOptions:
    whole = next((layer.keep_whole for layer in reversed(layers) if layer.keep_whole is not None), None)
    values: dict[str, Any] = {}
    for layer in layers:
        if not layer.keep_whole:
            values |= layer.said()
        elif whole:  # what was said before is for other tables of the pattern
            values = layer.said()
    return TableOptions(**values)
