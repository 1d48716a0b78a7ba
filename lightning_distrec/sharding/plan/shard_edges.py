"""Checks that shards cover a table and are on the ranks where torchrec expects them for its sharding type."""

from collections.abc import Sequence

from lightning_distrec.sharding.plan.planned_table import PlannedShard, PlannedTable
from lightning_distrec.sharding.sharding_types import COLUMN_TYPES, ONE_NODE_TYPES, ROW_TYPES

Strip = list[PlannedShard]
"""The shards of some columns, by their first row."""


def why_not_placed(table: PlannedTable, num_ranks: int, ranks_per_node: int) -> str:
    """Return why torchrec cannot hold a table in these shards; "" where it can."""
    if table.sharding_type == "data_parallel":
        return _why_not_on_all(table, num_ranks)
    strips = _strips(table.shards)
    return (
        _why_not_covered(strips, table)
        or _why_not_these_edges(strips, table.sharding_type)
        or _why_not_aligned(strips)
        or _why_not_on_these(strips, table, num_ranks, ranks_per_node)
    )


def why_not_inside(shard: PlannedShard, rows: int, dim: int, num_ranks: int) -> str:
    """Return why a shard cannot be one of a table of this size; "" where it can."""
    for what, offset, size, end in zip(("row", "column"), shard.offsets, shard.sizes, (rows, dim), strict=True):
        if offset + size > end:
            return f"exceeds the table: {what}s {offset} to {offset + size - 1}, and the last one is {end - 1}"
    if shard.rank >= num_ranks:
        return f"is on rank {shard.rank}, and the last one is {num_ranks - 1}"
    return ""


def _why_not_on_all(table: PlannedTable, num_ranks: int) -> str:
    all_of_it = ((0, 0), (table.num_rows, table.dim))
    if any((shard.offsets, shard.sizes) != all_of_it for shard in table.shards):
        return "data_parallel: each rank holds all of the table, and a shard has only some of it"
    if [shard.rank for shard in table.shards] != list(range(len(table.shards))) or len(table.shards) != num_ranks:
        return f"data_parallel: each of {num_ranks} ranks must hold the table once"
    return ""


def _strips(shards: Sequence[PlannedShard]) -> list[Strip]:
    strips: dict[tuple[int, int], Strip] = {}
    for shard in sorted(shards, key=lambda shard: (shard.offsets[1], shard.sizes[1], shard.offsets[0])):
        strips.setdefault((shard.offsets[1], shard.sizes[1]), []).append(shard)
    return list(strips.values())


def _why_not_covered(strips: list[Strip], table: PlannedTable) -> str:
    columns = [(strip[0].offsets[1], strip[0].sizes[1]) for strip in strips]
    if reason := _why_no_cover(columns, table.dim, "columns", ""):
        return reason
    for strip, (first, width) in zip(strips, columns, strict=True):
        rows = [(shard.offsets[0], shard.sizes[0]) for shard in strip]
        of = "" if len(strips) == 1 else f" of columns {first} to {first + width - 1}"
        if reason := _why_no_cover(rows, table.num_rows, "rows", of):
            return reason
    return ""


def _why_no_cover(blocks: list[tuple[int, int]], end: int, what: str, of: str) -> str:
    """Return why blocks (first, size), sorted, do not cover 0 to `end` exactly once; "" if they do."""
    at = 0
    for first, size in [*blocks, (end, 0)]:
        if first > at:
            return f"{what} {at} to {first - 1}{of} are in no shard"
        if first < at:
            return f"{what} {first} to {at - 1}{of} are in shards that overlap"
        at = first + size
    return ""


def _why_not_these_edges(strips: list[Strip], sharding_type: str) -> str:
    if sharding_type not in COLUMN_TYPES and len(strips) > 1:
        return f"{sharding_type} does not shard columns, and these shards do"
    if sharding_type not in ROW_TYPES and any(len(strip) > 1 for strip in strips):
        return f"{sharding_type} does not shard rows, and these shards do"
    return ""


def _why_not_aligned(strips: list[Strip]) -> str:
    widths = [strip[0].sizes[1] for strip in strips if strip[0].sizes[1] % 4]
    return f"a shard has {widths[0]} columns, and FBGEMM's rows come in multiples of 4" if widths else ""


def _why_not_on_these(strips: list[Strip], table: PlannedTable, num_ranks: int, ranks_per_node: int) -> str:
    sharding_type = table.sharding_type
    if sharding_type in ROW_TYPES:
        first_ranks = [
            0 if sharding_type == "row_wise" else s[0].rank // ranks_per_node * ranks_per_node for s in strips
        ]
        wanted = num_ranks if sharding_type == "row_wise" else ranks_per_node
        for strip, first in zip(strips, first_ranks, strict=True):
            if [shard.rank for shard in strip] != list(range(first, first + len(strip))) or len(strip) != wanted:
                return (
                    f"{sharding_type} gives each of the ranks {first} to {first + wanted - 1} one block of rows, in "
                    "the order of the ranks"
                )
            block = -(-table.num_rows // wanted)
            if any(shard.sizes[0] != block for shard in strip[:-1]):
                return (
                    f"{sharding_type} shards {table.num_rows} rows for {wanted} ranks into blocks of {block}, and the "
                    "last block is smaller"
                )
    nodes = {shard.rank // ranks_per_node for strip in strips for shard in strip}
    if sharding_type in ONE_NODE_TYPES and len(nodes) > 1:
        return f"{sharding_type} keeps a table on one node, and the shards are on {len(nodes)}"
    return ""
