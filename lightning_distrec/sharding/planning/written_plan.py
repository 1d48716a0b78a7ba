"""A plan in plain numbers, with what it was made for: what a plan file holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torchrec.distributed.types import CacheParams, EnumerableShardingSpec, ParameterSharding, ShardMetadata

from lightning_distrec.errors import PlanError, did_you_mean
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.tables import Table
from lightning_distrec.units import format_ranks, quantity


@dataclass(frozen=True)
class TableSize:
    """What a table is, however it is cut."""

    rows: int
    dim: int
    data_type: str
    """As torchrec's DataType has it: FP32, FP16."""

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.dim:,} {self.data_type}"


@dataclass(frozen=True)
class WrittenShard:
    """A rectangle of a table on a rank."""

    rank: int
    offsets: tuple[int, int]
    """First row and first column."""
    sizes: tuple[int, int]
    """Rows and columns."""

    @property
    def in_words(self) -> str:
        """What of the table it is."""
        (row, column), (rows, columns) = self.offsets, self.sizes
        return f"rows {row}-{row + rows - 1} of columns {column}-{column + columns - 1}"


@dataclass(frozen=True)
class WrittenTable:
    """Where one table is."""

    size: TableSize
    sharding_type: str
    compute_kernel: str
    shards: tuple[WrittenShard, ...]
    """By their first column, then row. A data_parallel table has all of itself on each rank."""
    cache_load_factor: float | None = None
    """Share of the rows that fused_uvm_caching keeps on the GPU; None for torchrec's own."""


@dataclass(frozen=True)
class WrittenPlan:
    """Where all tables of a module are."""

    num_ranks: int
    ranks_per_node: int
    device: str
    """Type of the ranks' devices, cpu or cuda."""
    tables: Mapping[str, WrittenTable]
    """By full name."""

    def as_plan(self, device: str, ranks_per_node: int) -> ShardingByTable:
        """Return it as sharders take it, for ranks with devices of this type."""
        return {name: _sharding(table, device, ranks_per_node) for name, table in self.tables.items()}


def ranks_per_node(places: NodeLayout) -> int:
    """Return how many ranks a node has for a plan; all of them, where nodes have unequal numbers."""
    return places.ranks_on_node if places.alike else places.num_ranks


def size_of(table: Table) -> TableSize:
    """Return what a table of a module is."""
    return TableSize(table.config.num_embeddings, table.config.embedding_dim, table.config.data_type.value)


def written_plan(tables: Iterable[Table], plan: ShardingByTable, places: NodeLayout, device: str) -> WrittenPlan:
    """Return a plan of these tables in plain numbers. device: type of the ranks' devices.

    Raises PlanError: something is set in it that plan files have no word for.
    """
    found = {table.full_name: _written(table, plan[table.full_name], places.num_ranks) for table in tables}
    return WrittenPlan(places.num_ranks, ranks_per_node(places), device, found)


def in_order(shards: Iterable[WrittenShard]) -> tuple[WrittenShard, ...]:
    """Return shards in the order in which torchrec takes them: by columns, then rows."""
    return tuple(sorted(shards, key=lambda shard: (shard.offsets[1], shard.offsets[0], shard.rank)))


def _written(table: Table, sharding: ParameterSharding, num_ranks: int) -> WrittenTable:
    size = size_of(table)
    spec = sharding.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        shards = in_order(_written_shard(shard) for shard in spec.shards)
    else:
        shards = tuple(WrittenShard(rank, (0, 0), (size.rows, size.dim)) for rank in range(num_ranks))
    cache = sharding.cache_params
    factor = None if cache is None else cache.load_factor
    if cache not in (None, CacheParams(load_factor=factor)):
        raise PlanError(f"table '{table.full_name}': plan files hold no more of cache_params={cache} than load_factor.")
    for option in ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype", "key_value_params"):
        if (value := getattr(sharding, option)) is not None:
            raise PlanError(f"table '{table.full_name}': {option}={value} is in its plan, and not in plan files.")
    return WrittenTable(size, sharding.sharding_type, sharding.compute_kernel, shards, factor)


def _written_shard(shard: ShardMetadata) -> WrittenShard:
    assert shard.placement is not None
    rank = shard.placement.rank()
    assert rank is not None
    (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
    return WrittenShard(rank, (row, column), (rows, columns))


def _sharding(table: WrittenTable, device: str, on_node: int) -> ParameterSharding:
    spec = None
    if table.sharding_type != "data_parallel":
        spec = EnumerableShardingSpec([
            ShardMetadata(
                shard_offsets=list(shard.offsets),
                shard_sizes=list(shard.sizes),
                placement=f"rank:{shard.rank}/{_device(device, shard.rank % on_node)}",
            )
            for shard in table.shards
        ])
    factor = table.cache_load_factor
    return ParameterSharding(
        sharding_type=table.sharding_type,
        compute_kernel=table.compute_kernel,
        ranks=[shard.rank for shard in table.shards],
        sharding_spec=spec,
        cache_params=None if factor is None else CacheParams(load_factor=factor),
    )


def _device(kind: str, number: int) -> str:
    return kind if kind == "cpu" else str(torch.device(kind, number))


# ------------------------------------------------------------------------------------------------------- differences


def differences(a: WrittenPlan, b: WrittenPlan, first: str = "the first", second: str = "the second") -> list[str]:
    """Return in what two plans differ, a line each. first, second: what they are called in the lines."""
    lines = [
        f"{first} is for {x}, {second} for {y}"
        for x, y in (
            (quantity(a.num_ranks, "rank"), quantity(b.num_ranks, "rank")),
            (f"{quantity(a.ranks_per_node, 'rank')} a node", f"{quantity(b.ranks_per_node, 'rank')} a node"),
            (f"devices of type {a.device}", f"devices of type {b.device}"),
        )
        if x != y
    ]
    lines += size_differences(
        {n: t.size for n, t in a.tables.items()}, {n: t.size for n, t in b.tables.items()}, first, second
    )
    for name, table in a.tables.items():
        other = b.tables.get(name)
        if other is not None:
            lines += [f"table '{name}' {line}" for line in _table_differences(table, other, first, second)]
    return lines


def size_differences(a: Mapping[str, TableSize], b: Mapping[str, TableSize], first: str, second: str) -> list[str]:
    """Return which tables are on one side only, with near matches on the other, and which are not of one size."""
    lines = []
    for here, there, side in ((a, b, first), (b, a, second)):
        new = [name for name in there if name not in here]
        for name in (name for name in here if name not in there):
            lines.append(f"table '{name}' is in {side} only{did_you_mean(name, new).rstrip('.')}")
    for name in (name for name in a if name in b and a[name] != b[name]):
        lines.append(f"table '{name}' is {a[name]} in {first}, {b[name]} in {second}")
    return lines


def _table_differences(a: WrittenTable, b: WrittenTable, first: str, second: str) -> list[str]:
    said = [
        (a.sharding_type, b.sharding_type, "is cut {} in"),
        (a.compute_kernel, b.compute_kernel, "has the kernel {} in"),
        (a.cache_load_factor, b.cache_load_factor, "has the cache load factor {} in"),
    ]
    lines = [f"{what.format(x)} {first}, {y} in {second}" for x, y, what in said if x != y]
    if a.size != b.size or (a.shards != b.shards and a.sharding_type != b.sharding_type):
        return lines + _rank_differences(a, b, first, second)
    if {(s.offsets, s.sizes) for s in a.shards} != {(s.offsets, s.sizes) for s in b.shards}:
        numbers = [quantity(len(table.shards), "shard") for table in (a, b)]
        return [*lines, f"has {numbers[0]} in {first}, {numbers[1]} of other edges in {second}"]
    if a.sharding_type == b.sharding_type == "data_parallel":
        return lines + _rank_differences(a, b, first, second)
    moved = [(x, y.rank) for x, y in zip(a.shards, b.shards, strict=True) if x.rank != y.rank]
    return lines + [f"has {x.in_words} on rank {x.rank} in {first}, {rank} in {second}" for x, rank in moved]


def _rank_differences(a: WrittenTable, b: WrittenTable, first: str, second: str) -> list[str]:
    on_a, on_b = (format_ranks(sorted({shard.rank for shard in table.shards})) for table in (a, b))
    return [] if on_a == on_b else [f"is on ranks {on_a} in {first}, {on_b} in {second}"]
