"""Options of planning, and of single tables by name or by a pattern of names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from lightning_distrec.errors import ConfigError, ShardingError, did_you_mean
from lightning_distrec.option_values import as_options, check_choice, plain_fields
from lightning_distrec.sharding.planning.bandwidths import BandwidthOption, as_bandwidths
from lightning_distrec.sharding.planning.topology import reservation_of
from lightning_distrec.sharding.sharders import KERNELS, SHARDING_TYPES, as_table_options
from lightning_distrec.sharding.tables import Table

EmbeddingUpdate = Literal["auto", "fused", "sparse", "dense", "fused_lazy"]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of one table; None takes the strategy's option for all tables.

    They are given by a table's name (`user_id`), by its full name, or by a pattern of either, in
    which a dot is an ordinary letter (`user_*`, `model.*`, `t[12]`). The full name is the
    collection's path and the name (`model.ebc.user_id`), or the path of an nn.Embedding. Where
    several fit, a later one overrides option by option: patterns in their order, then the name,
    then the full name. One that fits no table is an error with a suggestion.
    """

    embedding_update: EmbeddingUpdate | None = None
    """How to update the table: auto, fused, sparse, dense or fused_lazy."""

    optimizer: dict[str, Any] | None = None
    """Update the table by an optimizer of its own, see table_optimizer of TorchRecShardedStrategy:
    class_path, init_args, lr_scheduler."""

    sharding_types: list[str] | None = None
    """Allow these sharding types, for example ["row_wise"]."""

    compute_kernels: list[str] | None = None
    """Allow these kernels, which decide where rows are: "fused", in the device's memory;
    "fused_uvm", in the host's, on CUDA only; "fused_uvm_caching", in the host's with a cache on the
    GPU; "dense", for data_parallel only."""

    min_partition: int | None = None
    """Minimum number of columns of a column-wise shard; a multiple of 4."""

    pooling_factor: float | None = None
    """Average ids per example and feature, by which the planner estimates load; a wrong one costs
    time, and changes no more than the order of additions."""

    cache_load_factor: float | None = None
    """Share of the rows in the GPU's cache of a fused_uvm_caching table; between 0 and 1."""

    replicated: bool | None = None
    """Keep all of the table on every rank and average its gradient, as for a dense layer; without
    other options. Of an EmbeddingBagCollection some tables may be; of an EmbeddingCollection all or
    none."""

    gathered_weight: bool | None = None
    """Gather the full weight from all ranks where the module reads it, for tied output weights for
    example; every rank then holds all of it, and of its gradient, for the time of a step. Its
    update is dense."""

    ids: Literal["dynamic"] | None = None
    """Let ids be any numbers from 0 on, and give each one a row when it is first looked up in
    training."""

    rows: int | None = None
    """Rows of a table with ids: dynamic, rounded up to a multiple of `buckets`; None takes the
    module's number."""

    buckets: int | None = None
    """Blocks of rows of a table with ids: dynamic, which the number of ranks must divide; None
    chooses 12 to 20,160 by the rows."""

    evict: Literal["lru", "lfu", "never"] | None = None
    """Whose row a new id gets where none is free: the least recently used ("lru"; None is the
    same), the least frequently used, or none: it shares a row."""

    min_sights: int | None = None
    """How often an id is looked up in training until it gets a row of its own; None: once."""

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.sharding_types is not None:
            _check_names("sharding_types", self.sharding_types, SHARDING_TYPES, "one sharding type")
        if self.compute_kernels is not None:
            _check_names("compute_kernels", self.compute_kernels, KERNELS, "one kernel")
        if self.min_partition is not None and (self.min_partition < 4 or self.min_partition % 4):
            raise ConfigError(
                f"min_partition={self.min_partition}: FBGEMM's rows come in multiples of 4 columns."
            )
        if self.pooling_factor is not None and self.pooling_factor <= 0:
            raise ConfigError(f"pooling_factor={self.pooling_factor}: must be above 0.")
        self._check_cache()
        ignored = [name for name in self.explicit_options() if name != "replicated"]
        if self.replicated and ignored:
            raise ConfigError(
                "replicated=True: a table that every rank holds is not planned, and "
                f"{' and '.join(ignored)} would change nothing. Leave those out, or set "
                "replicated=False."
            )
        self._check_ids()
        if self.gathered_weight and self.embedding_update not in (None, "auto", "dense"):
            raise ConfigError(
                f"gathered_weight=True, embedding_update={self.embedding_update!r}: a weight that "
                "is read has a gradient for every row. Leave embedding_update out, or set it to "
                "'dense'."
            )
        if self.gathered_weight and "data_parallel" in (self.sharding_types or []):
            raise ConfigError(
                "gathered_weight=True: data_parallel tables are not gathered. Set replicated=True "
                "alone."
            )

    def _check_ids(self) -> None:
        for name in ("rows", "buckets", "min_sights"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1.")
        if self.rows is not None and self.buckets is not None and self.rows < 2 * self.buckets:
            raise ConfigError(
                f"rows={self.rows}, buckets={self.buckets}: a bucket needs at least 2 rows."
            )
        for name in ("rows", "buckets", "evict", "min_sights"):
            value = getattr(self, name)
            if value is not None and self.ids is None:
                raise ConfigError(f"{name}={value!r} is for a table with ids: dynamic. Set ids.")

    def _check_cache(self) -> None:
        share = self.cache_load_factor
        kernels = self.compute_kernels
        if share is not None and not 0 < share < 1:
            raise ConfigError(
                f"cache_load_factor={share}: must be a share of the rows, between 0 and 1. For all "
                "rows on the GPU set "
                'compute_kernels=["fused"], for none compute_kernels=["fused_uvm"].'
            )
        if share is not None and kernels is not None and "fused_uvm_caching" not in kernels:
            raise ConfigError(
                f"cache_load_factor={share}: only a fused_uvm_caching table has a cache, and "
                f"compute_kernels={kernels} leaves that out. Add it, or leave cache_load_factor "
                "out."
            )

    def explicit_options(self) -> dict[str, Any]:
        """Return the options that were set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _check_names(option: str, values: Iterable[str], allowed: tuple[str, ...], noun: str) -> None:
    # A string is iterable too: 'row_wise' would be read as eight types of one letter each.
    values = list(values)
    if not values:
        raise ConfigError(f"{option}=[]: at least {noun} must be allowed.")
    for value in values:
        check_choice(option, value, allowed)


# -------------------------------------------------------------------------------------------------
# options by name

OptionsByName = Mapping[str, TableOptions | Mapping[str, Any]]
"""Options by table name, by full name (where two collections use one name), or by a pattern of
either: "user_*"."""

# Patterns are recognized only for messages: `fnmatchcase` takes a name without these characters
# literally.
WILD = re.compile(r"[*?\[\]]")
"""What makes a name a pattern, as in file names."""


ShippedOptions = Mapping[str, list[TableOptions]]
"""Full name of a table -> the options that modules around it ship, the innermost module's first."""
NONE_SHIPPED: ShippedOptions = {}


def options_of_modules(root: nn.Module, tables: list[Table]) -> tuple[ShippedOptions, list[str]]:
    """Return what methods `table_options()` of modules in the tree return for tables below these;
    and that in words.

    Such a method returns options by name, by path from its module, or by a pattern of either; what
    fits no table that is sharded is reported, since a library does not know `min_rows`. Raises
    ConfigError: an option is wrong.
    """
    shipped: dict[str, list[TableOptions]] = {}
    lines = []
    # Outer modules come first in the tree. They are asked last, as they know what the inner ones
    # are used for.
    for path, module in reversed(list(root.named_modules())):
        if not hasattr(type(module), "table_options"):
            continue
        prefix = f"{path}." if path else ""
        place = f"table_options() of '{path or type(module).__name__}'"
        try:
            parsed = _parsed(module.table_options())  # type: ignore[operator]
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        fitted: set[str] = set()
        for table in tables:
            if table.full_name == path or table.full_name.startswith(prefix):
                names = (table.name, table.full_name.removeprefix(prefix))
                fitting = _fitting(names, parsed)
                fitted |= fitting.keys()
                shipped.setdefault(table.full_name, []).extend(fitting.values())
        texts = [name if name in fitted else f"{name} (no sharded table)" for name in parsed]
        lines.append(f"{place} has options of {', '.join(texts)}")
    return shipped, lines


def options_by_table(
    tables: list[Table],
    everywhere: TableOptions,
    user_options: OptionsByName,
    shipped: ShippedOptions = NONE_SHIPPED,
) -> dict[str, TableOptions]:
    """Return the options of every table by its full name: `everywhere`, overridden by the user's
    for it.

    A later pattern overrides an earlier one, option by option, a name any pattern, and a full name
    a name; and all of these override what is shipped.
    Raises ConfigError: a name or pattern that matches no table; an unknown option; options that
    contradict each other.
    """
    parsed = _parsed(user_options)
    names = {name for table in tables for name in (table.name, table.full_name)}
    for name in parsed:
        # Exact names come first: a name may contain a bracket, which would make it a pattern that
        # does not fit itself.
        if name in names or any(fnmatchcase(table_name, name) for table_name in names):
            continue
        problem = f"no table fits {name!r}" if WILD.search(name) else f"there is no table {name!r}"
        raise ConfigError(
            f"tables: {problem}{did_you_mean(WILD.sub('', name), names)} {_known_in_words(tables)}"
        )
    return {table.full_name: _table_options(table, everywhere, parsed, shipped) for table in tables}


def _known_in_words(tables: list[Table]) -> str:
    if tables:
        return f"The tables are {', '.join(table.full_name for table in tables)}."
    return (
        "There are no tables: an nn.Embedding is one with convert_embeddings, and from min_rows "
        "rows on."
    )


def refuse_named_odd_dims(
    tables: list[Table],
    odd_tables: list[Table],
    reasons: Mapping[str, str],
    user_options: OptionsByName,
) -> None:
    """Raise ShardingError where a name or pattern fits only tables of odd dims, and is not about
    replicating them.

    reasons: path of a collection -> the reason why it is not sharded.
    """
    for name, options in _parsed(user_options).items():
        # A pattern that also fits tables which can be sharded was meant for those.
        if options.replicated or any(_fits(table, name) for table in tables):
            continue
        odd = next((table for table in odd_tables if _fits(table, name)), None)
        if odd is not None:
            raise ShardingError(
                f"tables[{name!r}]: '{odd.full_name}' cannot be sharded: "
                f"{reasons[odd.collection]}. Change the dim, give tables of other dims a "
                "collection of their own, or set replicated=True alone."
            )


def _fits(table: Table, name: str) -> bool:
    return any(
        table_name == name or fnmatchcase(table_name, name)
        for table_name in (table.name, table.full_name)
    )


def replicated_collections(
    tables: list[Table], user_options: OptionsByName, shipped: ShippedOptions = NONE_SHIPPED
) -> set[str]:
    """Return the collections, by path, of which all tables are replicated: they stay ordinary
    layers.

    Raises ConfigError: options that contradict each other; an EmbeddingCollection of which some
    tables are replicated.
    """
    parsed = _parsed(user_options)
    paths: set[str] = set()
    for path in dict.fromkeys(table.collection for table in tables):
        collection_tables = [table for table in tables if table.collection == path]
        replicated = []
        for t in collection_tables:
            if _table_options(t, TableOptions(), parsed, shipped).replicated:
                replicated.append(t)
        if len(replicated) == len(collection_tables):
            paths.add(path)
        elif replicated and not collection_tables[0].pooled:
            raise ConfigError(
                f"table '{replicated[0].full_name}': replicated=True, but an EmbeddingCollection "
                "is sharded with all of its tables or not at all. Set it for all tables of "
                f"'{path}', as '{path}.*', or for none."
            )
    return paths


def _parsed(user_options: OptionsByName) -> dict[str, TableOptions]:
    if not isinstance(user_options, Mapping):
        raise ConfigError(f"tables={user_options!r}: a dict from table names to options is needed.")
    return {name: _as_options(name, options) for name, options in user_options.items()}


def _as_options(name: str, options: TableOptions | Mapping[str, Any]) -> TableOptions:
    place = f"tables[{name!r}]"
    try:
        plain = as_table_options(options) if isinstance(options, ParameterConstraints) else options
        return as_options(place, TableOptions, plain)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(place) else f"{place}: {text}") from None


def _fitting(names: tuple[str, str], parsed: Mapping[str, TableOptions]) -> dict[str, TableOptions]:
    """Return the options of a table by what names it; later ones override. names: its name and its
    full name."""
    fitting = {}
    for pattern, options in parsed.items():
        fits = any(fnmatchcase(name, pattern) for name in names)
        if fits and pattern not in names:
            fitting[pattern] = options
    # The name before the full name, so that the latter wins.
    return fitting | {name: parsed[name] for name in names if name in parsed}


def _table_options(
    table: Table,
    everywhere: TableOptions,
    parsed: Mapping[str, TableOptions],
    shipped: ShippedOptions,
) -> TableOptions:
    fitting = _fitting((table.name, table.full_name), parsed)
    try:
        return _merged([everywhere, *shipped.get(table.full_name, ()), *fitting.values()])
    except ConfigError as error:
        raise ConfigError(f"table '{table.full_name}': {error}") from None


def _merged(layers: list[TableOptions]) -> TableOptions:
    replicated = next(
        (layer.replicated for layer in reversed(layers) if layer.replicated is not None), None
    )
    values: dict[str, Any] = {}
    for layer in layers:
        if not layer.replicated:
            values |= layer.explicit_options()
        # Options of earlier layers are for other tables of the pattern. replicated=True refuses
        # options next to it, so that merging them would fail.
        elif replicated:
            values = layer.explicit_options()
    return TableOptions(**values)


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How it is decided where tables go."""

    bandwidths: BandwidthOption = None
    """How fast bytes move: intra_node, cross_node, device_memory, host_memory, host_to_device, each
    such as "25GB/s" or "measure". "measure" measures what neither this nor INTRA_NODE_BANDWIDTH and
    CROSS_NODE_BANDWIDTH say. None: those variables, or else torchrec's defaults, and gloo's on
    CPUs."""

    reserve: str | float | None = None
    """Memory of each rank that is not for tables: a percentage such as "15%", or a size such as
    "4GB". None: STORAGE_RESERVE_PERCENT, or else 15%, or what the layers without tables need where
    that is more."""

    estimate_pooling: int = 0
    """Batches of each rank's training dataloader in which the ids per example of every feature are
    counted before tables are planned, where no pooling_factor is given; 0: none. Training gets
    these batches, too."""

    plan_file: str | TorchRecPlan | None = None
    """Place tables as this file says, or the one in this checkpoint's folder, or TorchRec's
    ShardingPlan; it must suit the model and the ranks."""

    def __post_init__(self) -> None:
        plain_fields(self)
        # Both are parsed for their errors only, so that a wrong value fails where the strategy is
        # made, and not on the ranks.
        as_bandwidths(self.bandwidths)
        reservation_of(self.reserve, {})
        if self.estimate_pooling < 0:
            raise ConfigError(
                f"planning.estimate_pooling={self.estimate_pooling}: a number of batches is "
                "needed, 0 for none."
            )
        is_plan = isinstance(self.plan_file, (str, TorchRecPlan)) and self.plan_file
        if self.plan_file is not None and not is_plan:
            raise ConfigError(
                f"plan_file={self.plan_file!r}: a path as a string is needed, or None to let "
                "tables be planned."
            )
