"""Whether shards make up a table, and are where torchrec looks for them in a table that is cut that way."""

from collections.abc import Sequence

from lightning_distrec.sharding.planning.written_plan import WrittenShard, WrittenTable
from lightning_distrec.sharding.sharding_types import COLUMN_TYPES, ONE_NODE_TYPES, ROW_TYPES

Strip = list[WrittenShard]
"""The shards of some columns, by their first row."""


def why_not_placed(table: WrittenTable, num_ranks: int, ranks_per_node: int) -> str:
    """Return why torchrec cannot hold a table in these shards; "" where it can."""
    if table.sharding_type == "data_parallel":
        return _why_not_on_all(table, num_ranks)
    strips = _strips(table.shards)
    return (
        _why_not_covered(strips, table)
        or _why_not_so_many(strips, table.sharding_type)
        or _why_not_aligned(strips)
        or _why_not_on_these(strips, table, num_ranks, ranks_per_node)
    )


def why_not_inside(shard: WrittenShard, rows: int, dim: int, num_ranks: int) -> str:
    """Return why a shard cannot be one of a table of this size; "" where it can."""
    for what, offset, size, end in zip(("row", "column"), shard.offsets, shard.sizes, (rows, dim), strict=True):
        if offset + size > end:
            return f"goes over the table's edge: {what}s {offset} to {offset + size - 1}, and the last one is {end - 1}"
    if shard.rank >= num_ranks:
        return f"is on rank {shard.rank}, and the last one is {num_ranks - 1}"
    return ""


def _why_not_on_all(table: WrittenTable, num_ranks: int) -> str:
    whole = ((0, 0), (table.size.rows, table.size.dim))
    if any((shard.offsets, shard.sizes) != whole for shard in table.shards):
        return "data_parallel: each rank holds the whole table, and a shard is a part of it"
    if [shard.rank for shard in table.shards] != list(range(len(table.shards))) or len(table.shards) != num_ranks:
        return f"data_parallel: each of {num_ranks} ranks must hold the table once"
    return ""


def _strips(shards: Sequence[WrittenShard]) -> list[Strip]:
    strips: dict[tuple[int, int], Strip] = {}
    for shard in sorted(shards, key=lambda shard: (shard.offsets[1], shard.sizes[1], shard.offsets[0])):
        strips.setdefault((shard.offsets[1], shard.sizes[1]), []).append(shard)
    return list(strips.values())


def _why_not_covered(strips: list[Strip], table: WrittenTable) -> str:
    columns = [(strip[0].offsets[1], strip[0].sizes[1]) for strip in strips]
    if reason := _why_no_row_of(columns, table.size.dim, "columns", ""):
        return reason
    for strip, (first, width) in zip(strips, columns, strict=True):
        rows = [(shard.offsets[0], shard.sizes[0]) for shard in strip]
        of = "" if len(strips) == 1 else f" of columns {first} to {first + width - 1}"
        if reason := _why_no_row_of(rows, table.size.rows, "rows", of):
            return reason
    return ""


def _why_no_row_of(blocks: list[tuple[int, int]], end: int, what: str, of: str) -> str:
    """Return why blocks (first, size), by their first, do not stand side by side from 0 to `end`; "" if they do."""
    at = 0
    for first, size in [*blocks, (end, 0)]:
        if first > at:
            return f"{what} {at} to {first - 1}{of} are in no shard"
        if first < at:
            return f"{what} {first} to {at - 1}{of} are in shards that overlap"
        at = first + size
    return ""


def _why_not_so_many(strips: list[Strip], cut: str) -> str:
    if cut not in COLUMN_TYPES and len(strips) > 1:
        return f"{cut} does not cut columns, and the shards do"
    if cut not in ROW_TYPES and any(len(strip) > 1 for strip in strips):
        return f"{cut} does not cut rows, and the shards do"
    return ""


def _why_not_aligned(strips: list[Strip]) -> str:
    widths = [strip[0].sizes[1] for strip in strips if strip[0].sizes[1] % 4]
    return f"a shard has {widths[0]} columns, and FBGEMM's rows come in multiples of 4" if widths else ""


def _why_not_on_these(strips: list[Strip], table: WrittenTable, num_ranks: int, ranks_per_node: int) -> str:
    cut = table.sharding_type
    if cut in ROW_TYPES:
        first_ranks = [0 if cut == "row_wise" else s[0].rank // ranks_per_node * ranks_per_node for s in strips]
        wanted = num_ranks if cut == "row_wise" else ranks_per_node
        for strip, first in zip(strips, first_ranks, strict=True):
            if [shard.rank for shard in strip] != list(range(first, first + len(strip))) or len(strip) != wanted:
                return (
                    f"{cut} gives each of the ranks {first} to {first + wanted - 1} one block of rows, in the order "
                    "of the ranks"
                )
            block = -(-table.size.rows // wanted)
            if any(shard.sizes[0] != block for shard in strip[:-1]):
                return f"{cut} cuts {table.size.rows} rows for {wanted} ranks into blocks of {block}, and the last less"
    nodes = {shard.rank // ranks_per_node for strip in strips for shard in strip}
    if cut in ONE_NODE_TYPES and len(nodes) > 1:
        return f"{cut} keeps a table on one node, and the shards are on {len(nodes)}"
    return ""
