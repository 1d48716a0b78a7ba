"""How two plans differ, line by line."""

from collections.abc import Mapping

from lightning_distrec.errors import did_you_mean
from lightning_distrec.sharding.plan.planned_table import PlannedTable
from lightning_distrec.sharding.plan.sharding_plan import ShardingPlan
from lightning_distrec.units import format_ranks, quantity


def differences(a: ShardingPlan, b: ShardingPlan, first: str = "the first", second: str = "the second") -> list[str]:
    """Return how two plans differ, one line each. first, second: what the lines call them."""
    lines = [
        f"{first} is for {x}, {second} for {y}"
        for x, y in (
            (quantity(a.num_ranks, "rank"), quantity(b.num_ranks, "rank")),
            (
                f"{quantity(a.layout.ranks_per_node, 'rank')} per node",
                f"{quantity(b.layout.ranks_per_node, 'rank')} per node",
            ),
            (f"devices of type {a.device}", f"devices of type {b.device}"),
        )
        if x != y
    ]
    lines += size_differences(
        {name: table.size for name, table in a.tables.items()},
        {name: table.size for name, table in b.tables.items()},
        first,
        second,
    )
    for name, table in a.tables.items():
        other = b.tables.get(name)
        if other is not None:
            lines += [f"table '{name}' {line}" for line in _table_differences(table, other, first, second)]
    return lines


def size_differences(a: Mapping[str, str], b: Mapping[str, str], first: str, second: str) -> list[str]:
    """Return which tables are on one side only, with near matches on the other, and which differ in size."""
    lines = []
    for here, there, side in ((a, b, first), (b, a, second)):
        new = [name for name in there if name not in here]
        for name in (name for name in here if name not in there):
            lines.append(f"table '{name}' is in {side} only{did_you_mean(name, new).rstrip('.')}")
    for name in (name for name in a if name in b and a[name] != b[name]):
        lines.append(f"table '{name}' is {a[name]} in {first}, {b[name]} in {second}")
    return lines


def _table_differences(a: PlannedTable, b: PlannedTable, first: str, second: str) -> list[str]:
    compared = [
        (a.sharding_type, b.sharding_type, "is sharded {} in"),
        (a.compute_kernel, b.compute_kernel, "has the kernel {} in"),
        (a.cache_load_factor, b.cache_load_factor, "has the cache load factor {} in"),
    ]
    lines = [f"{what.format(x)} {first}, {y} in {second}" for x, y, what in compared if x != y]
    if a.size != b.size or (a.shards != b.shards and a.sharding_type != b.sharding_type):
        return lines + _rank_differences(a, b, first, second)
    if {(s.offsets, s.sizes) for s in a.shards} != {(s.offsets, s.sizes) for s in b.shards}:
        numbers = [quantity(len(table.shards), "shard") for table in (a, b)]
        return [*lines, f"has {numbers[0]} in {first}, {numbers[1]} of other sizes in {second}"]
    if a.sharding_type == b.sharding_type == "data_parallel":
        return lines + _rank_differences(a, b, first, second)
    moved = [(x, y.rank) for x, y in zip(a.shards, b.shards, strict=True) if x.rank != y.rank]
    return lines + [f"has {x} on rank {x.rank} in {first}, {rank} in {second}" for x, rank in moved]


def _rank_differences(a: PlannedTable, b: PlannedTable, first: str, second: str) -> list[str]:
    on_a, on_b = (format_ranks(sorted({shard.rank for shard in table.shards})) for table in (a, b))
    return [] if on_a == on_b else [f"is on ranks {on_a} in {first}, {on_b} in {second}"]
