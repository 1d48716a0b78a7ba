"""Writes and reads plans as JSON files that people read and edit: plan.json."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchrec.modules.embedding_configs import DataType

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.errors import ConfigError, PlanError, did_you_mean
from lightning_distrec.sharding.planning.checks import bounds_error, placement_error
from lightning_distrec.sharding.planning.planned_table import PlannedShard, PlannedTable, in_order
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.sharders import KERNELS, SHARDING_TYPES
from lightning_distrec.sharding.sharding_groups import NodeLayout

PLAN_FILE = "plan.json"
"""Name of a plan's file in log folders and checkpoints."""
VERSION = 1
"""Version of the format; a reader refuses others."""
LARGEST = 2**62
"""Larger numbers are refused."""
MAX_RANKS = 2**20
"""More than any cluster has; what is computed from a plan takes memory for each rank."""

_PLAN_FIELDS = ("version", "num_ranks", "ranks_per_node", "device", "tables")
_TABLE_FIELDS = ("rows", "dim", "data_type", "sharding_type", "compute_kernel", "shards")
_SHARD_FIELDS = ("rank", "offsets", "sizes")
_CACHE = "cache_load_factor"


def save_plan(path: str | Path, plan: ShardingPlan) -> None:
    """Write a plan's file atomically. Raises OSError: it cannot be written."""
    replace_file(Path(path), plan_text(plan).encode())


def plan_text(plan: ShardingPlan) -> str:
    """Return a plan as JSON, with a line for each table and each shard."""
    head = {
        "version": VERSION,
        "num_ranks": plan.num_ranks,
        "ranks_per_node": plan.layout.ranks_per_node,
        "device": plan.device,
    }
    # Not json.dumps with an indent, which puts every number on a line of its own: one line a shard
    # can be compared.
    lines = [f' "{name}": {json.dumps(value)},' for name, value in head.items()]
    tables = ",\n".join(_table_text(name, table) for name, table in plan.tables.items())
    return "\n".join(["{", *lines, ' "tables": {', tables, " }", "}", ""])


def _table_text(name: str, table: PlannedTable) -> str:
    fields: dict[str, Any] = {
        "rows": table.num_rows,
        "dim": table.dim,
        "data_type": table.data_type,
        "sharding_type": table.sharding_type,
        "compute_kernel": table.compute_kernel,
    }
    if table.cache_load_factor is not None:
        fields[_CACHE] = table.cache_load_factor
    shards = ",\n".join(f"   {json.dumps(shard._asdict())}" for shard in table.shards)
    return f'  {json.dumps(name)}: {json.dumps(fields)[:-1]}, "shards": [\n{shards}\n  ]}}'


def load_plan(path: str | Path, read: Callable[[Path], bytes] = Path.read_bytes) -> ShardingPlan:
    """Return the plan in a file, or in the plan.json of a checkpoint's folder.

    Raises ConfigError: there is no such file. PlanError, with the place in the file: it is no valid
    plan.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / PLAN_FILE
        content = read(file)
    except OSError as error:
        raise ConfigError(
            f"the plan {file} cannot be read: {error.strerror or error}. Name a {PLAN_FILE}, or "
            "the folder of a checkpoint or of logs that has one; runs save it when they start to "
            "train."
        ) from None
    except ValueError as error:  # a zero in the path
        raise PlanError(f"{file} is not a plan: {error}.") from None
    return parse_plan(content, str(file))


def parse_plan(content: bytes, name: str) -> ShardingPlan:
    """Return the plan that `content`, called `name` in messages, holds. Raises PlanError."""
    try:
        parsed = json.loads(content, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name} is not a plan: {error}.") from None
    try:
        return _plan(parsed)
    except _Wrong as wrong:
        raise PlanError(f"{name} is not a valid plan: {wrong}") from None


class _Wrong(Exception):
    """An error in a plan's file, with its place."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}" if place else reason)


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    # json silently keeps the last of two equal keys: a table that is in the file twice would lose
    # one entry.
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} is in it twice"
        )
    return fields


def _plan(content: Any) -> ShardingPlan:
    # `type(...) is`, because True is an instance of int.
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        raise _Wrong("", f"it has no integer version, as every {PLAN_FILE} does.")
    if content["version"] != VERSION:
        reason = f"{content['version']}, and this version of lightning_distrec reads {VERSION}."
        raise _Wrong("version", f"{reason} Install the version that wrote it, or a later one.")
    _check_fields(content, "", _PLAN_FIELDS)
    num_ranks = _number(content["num_ranks"], "num_ranks", smallest=1, largest=MAX_RANKS)
    on_node = _number(content["ranks_per_node"], "ranks_per_node", smallest=1, largest=MAX_RANKS)
    if num_ranks % on_node:
        raise _Wrong(
            "ranks_per_node",
            f"{num_ranks} ranks cannot be divided into nodes of {on_node} ranks each.",
        )
    device = _one_of(content["device"], "device", ("cpu", "cuda"))
    tables = content["tables"]
    if not isinstance(tables, dict):
        raise _Wrong("tables", "an object is needed, from full names of tables to their shards.")
    return ShardingPlan(
        layout=NodeLayout.equal(num_ranks, on_node),
        device=device,
        tables={name: _table(name, table, num_ranks, on_node) for name, table in tables.items()},
    )


def _table(name: str, content: Any, num_ranks: int, on_node: int) -> PlannedTable:
    place = f"tables[{name!r}]"
    _check_fields(content, place, _TABLE_FIELDS, (_CACHE,))
    rows = _number(content["rows"], f"{place}.rows", smallest=1)
    dim = _number(content["dim"], f"{place}.dim", smallest=1)
    sharding_type = _one_of(content["sharding_type"], f"{place}.sharding_type", SHARDING_TYPES)
    kernel = _one_of(content["compute_kernel"], f"{place}.compute_kernel", KERNELS)
    factor = content.get(_CACHE, 1)
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        raise _Wrong(
            f"{place}.{_CACHE}",
            f"{factor!r} is no share of the rows; it must be above 0 and at most 1.",
        )
    if (sharding_type == "data_parallel") != (kernel == "dense"):
        reason = (
            f"{kernel} with {sharding_type}: data_parallel tables have the kernel dense, and only "
            "those."
        )
        raise _Wrong(f"{place}.compute_kernel", reason)
    shards = in_order(
        _shard(shard, f"{place}.shards[{number}]", rows, dim, num_ranks)
        for number, shard in enumerate(_list(content["shards"], f"{place}.shards"))
    )
    table = PlannedTable(
        name=name,
        num_rows=rows,
        dim=dim,
        data_type=_one_of(
            content["data_type"], f"{place}.data_type", [kind.value for kind in DataType]
        ),
        sharding_type=sharding_type,
        compute_kernel=kernel,
        shards=shards,
        cache_load_factor=content.get(_CACHE),
    )
    reason = placement_error(table, num_ranks, on_node)
    if reason:
        raise _Wrong(f"{place}.shards", f"{reason}.")
    return table


def _shard(content: Any, place: str, num_rows: int, dim: int, num_ranks: int) -> PlannedShard:
    _check_fields(content, place, _SHARD_FIELDS)
    row, column = _pair(content["offsets"], f"{place}.offsets", smallest=0)
    rows, columns = _pair(content["sizes"], f"{place}.sizes", smallest=1)
    shard = PlannedShard(
        _number(content["rank"], f"{place}.rank", smallest=0), (row, column), (rows, columns)
    )
    reason = bounds_error(shard, num_rows, dim, num_ranks)
    if reason:
        raise _Wrong(place, f"{reason}.")
    return shard


def _check_fields(
    content: Any, place: str, needed: Sequence[str], optional: Sequence[str] = ()
) -> None:
    if not isinstance(content, dict):
        raise _Wrong(place, f"an object with {', '.join(needed)} is needed.")
    missing = [name for name in needed if name not in content]
    if missing:
        raise _Wrong(place, f"{', '.join(missing)} is missing.")
    allowed = (*needed, *optional)
    for name in content:
        if name not in allowed:
            raise _Wrong(
                place,
                f"{name!r} is not known{did_you_mean(name, allowed)} There are "
                f"{', '.join(allowed)}.",
            )


def _number(value: Any, place: str, smallest: int, largest: int = LARGEST) -> int:
    if type(value) is not int or not smallest <= value <= largest:
        limit = f" and at most {largest:,}" if largest != LARGEST else ""
        raise _Wrong(place, f"{_short(value)} is not a whole number of at least {smallest}{limit}.")
    return value


def _pair(value: Any, place: str, smallest: int) -> tuple[int, int]:
    if len(_list(value, place)) != 2:
        raise _Wrong(place, f"{_short(value)} is not two numbers, of rows and of columns.")
    rows, columns = (_number(number, f"{place}[{i}]", smallest) for i, number in enumerate(value))
    return rows, columns


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(place, f"{_short(value)} is not a list.")
    return value


def _one_of(value: Any, place: str, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = did_you_mean(value, allowed) if isinstance(value, str) else "."
        raise _Wrong(place, f"{_short(value)} is not known{near} Use one of {', '.join(allowed)}.")
    return value


def _short(value: Any) -> str:
    try:
        text = repr(value)
    # A number of thousands of digits; lists in lists in lists.
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:40]}..."
