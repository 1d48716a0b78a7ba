"""Brings rows to their shards: the user's own weights, a loaded file's, an earlier plan's, or new ones."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor

from lightning_distrec.sharding.tables import Table

CHUNK_BYTES = 64 * 2**20
"""Most that is sent, or made and partly thrown away, at a time."""
BLOCK_ROWS = 2**16
"""Rows that are initialised together, so that a row's first value does not depend on the plan."""


@dataclass(frozen=True)
class TableShard:
    """A rectangle of a table, and where it is."""

    rank: int
    row: int
    column: int
    num_rows: int
    num_columns: int
    tensor: Tensor | None = None
    """(num_rows, num_columns); None on ranks that do not hold it."""


def pieces_of(weight: Tensor, num_ranks: int, rank: int) -> list[TableShard]:
    """Return all pieces of a sharded table on all ranks, `tensor` set for those of this rank.

    weight: a ShardedTensor, or the plain tensor of a table that every rank holds whole.
    """
    if not isinstance(weight, ShardedTensor):
        rows, columns = weight.shape
        return [TableShard(r, 0, 0, rows, columns, weight if r == rank else None) for r in range(num_ranks)]
    local = {tuple(s.metadata.shard_offsets): s.tensor for s in weight.local_shards()}
    pieces = []
    for shard in weight.metadata().shards_metadata:
        assert shard.placement is not None
        owner = shard.placement.rank()
        assert owner is not None
        tensor = local[tuple(shard.shard_offsets)] if owner == rank else None
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        pieces.append(TableShard(owner, row, column, rows, columns, tensor))
    return pieces


def sharded_weights(sharded: nn.Module, tables: list[Table]) -> dict[str, Tensor]:
    """Return the weights of one sharded collection by the tables' full names; ShardedTensors that share memory."""
    state = sharded.state_dict()
    return {table.full_name: state[table.local_key] for table in tables}


@torch.no_grad()
def spread(sources: list[TableShard], targets: list[TableShard], device: torch.device) -> None:
    """Collective. Copy the source pieces into the target pieces, of one table, whoever holds them.

    Sources that overlap must hold the same values. Nothing travels where every rank already has what it needs.
    """
    if all(any(_same_place(source, target) for source in sources) for target in targets):
        for target in targets:
            if target.tensor is not None:
                source = next(s for s in sources if _same_place(s, target))
                assert source.tensor is not None
                target.tensor.copy_(source.tensor)
        return
    for source in _without_copies(sources):
        for chunk in _chunks(source):
            buffer = (
                chunk.tensor.detach().to(device, torch.float32).contiguous()
                if chunk.tensor is not None
                else torch.empty(chunk.num_rows, chunk.num_columns, device=device)
            )
            dist.broadcast(buffer, src=source.rank)
            for target in targets:
                _copy_overlap(buffer, chunk, target)


def copy_from_full(targets: list[TableShard], tensor: Tensor) -> None:
    """Copy a whole table that this rank holds, `tensor` (num_rows, dim), into the pieces of this rank."""
    rows, columns = tensor.shape
    whole = TableShard(0, 0, 0, rows, columns, tensor)
    for target in targets:
        _copy_overlap(tensor, whole, target)


def initialise(table: Table, targets: list[TableShard], seed: int) -> None:
    """Fill this rank's pieces of a table that was built without memory, by the init function of its config.

    The function is called on whole blocks of BLOCK_ROWS rows, each with a generator seeded by the seed, the table and
    the block; the rank keeps what it holds of a block. So the values do not depend on ranks or plan, for tables of one
    block whatever the function, for larger ones where it treats all elements alike (uniform_, normal_, constant_ ...).
    """
    config = table.config
    assert config.init_fn is not None
    for target in targets:
        if target.tensor is None or target.num_rows == 0:
            continue
        for block in range(target.row // BLOCK_ROWS, (target.row + target.num_rows - 1) // BLOCK_ROWS + 1):
            start = block * BLOCK_ROWS
            rows = min(BLOCK_ROWS, config.num_embeddings - start)
            values = torch.empty(rows, config.embedding_dim, device=target.tensor.device)
            with torch.random.fork_rng(devices=[values.device] if values.is_cuda else []), torch.no_grad():
                torch.manual_seed(_seed(seed, table.full_name, block))
                config.init_fn(values)
            _copy_overlap(values, TableShard(target.rank, start, 0, rows, config.embedding_dim), target)


def _seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _same_place(a: TableShard, b: TableShard) -> bool:
    return (a.rank, a.row, a.column, a.num_rows, a.num_columns) == (b.rank, b.row, b.column, b.num_rows, b.num_columns)


def _without_copies(pieces: list[TableShard]) -> list[TableShard]:
    seen: dict[tuple[int, int, int, int], TableShard] = {}
    for piece in pieces:
        seen.setdefault((piece.row, piece.column, piece.num_rows, piece.num_columns), piece)
    return list(seen.values())


def _chunks(piece: TableShard) -> Iterator[TableShard]:
    rows_at_once = max(1, CHUNK_BYTES // (4 * piece.num_columns))
    for first in range(0, piece.num_rows, rows_at_once):
        rows = min(rows_at_once, piece.num_rows - first)
        tensor = None if piece.tensor is None else piece.tensor[first : first + rows]
        yield TableShard(piece.rank, piece.row + first, piece.column, rows, piece.num_columns, tensor)


def _copy_overlap(values: Tensor, source: TableShard, target: TableShard) -> None:
    if target.tensor is None:
        return
    top, left = max(source.row, target.row), max(source.column, target.column)
    bottom = min(source.row + source.num_rows, target.row + target.num_rows)
    right = min(source.column + source.num_columns, target.column + target.num_columns)
    if top >= bottom or left >= right:
        return
    with torch.no_grad():
        target.tensor[top - target.row : bottom - target.row, left - target.column : right - target.column].copy_(
            values[top - source.row : bottom - source.row, left - source.column : right - source.column]
        )
