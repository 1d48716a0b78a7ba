"""Brings rows to their shards: the user's own weights, a loaded file's, an earlier plan's, or new
ones."""

import hashlib
import inspect
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor

from lightning_distrec.chunks import Chunk
from lightning_distrec.host_memory import release_pages
from lightning_distrec.sharding.meta_weight import initial_rows
from lightning_distrec.sharding.sharding_groups import ShardingGroups
from lightning_distrec.sharding.tables import Table

CHUNK_BYTES = 64 * 2**20
"""Maximum that is sent, or made and partly thrown away, at a time."""
BLOCK_ROWS = 2**16
"""Rows that are initialised together, so that a row's first value does not depend on the plan."""
PROGRESS_SECONDS = 5.0
"""How long rows of a table are drawn before a line reports it."""


@dataclass(frozen=True)
class TableShard:
    """A rectangle of a table on some rank: a shard, a chunk of one, or a whole unsharded table."""

    rank: int
    row: int
    column: int
    num_rows: int
    num_columns: int
    tensor: Tensor | None = None
    """(num_rows, num_columns); None on ranks that do not hold it."""
    is_last_use: bool = False
    """Whether nobody reads its memory afterwards, so that it may be freed part by part."""

    @property
    def rectangle(self) -> tuple[int, int, int, int]:
        """Where it is in the table."""
        return self.row, self.column, self.num_rows, self.num_columns

    def to_be_moved(self) -> "TableShard":
        """Return it in the host's memory, from which it is freed while it is copied."""
        return replace(
            self, tensor=None if self.tensor is None else self.tensor.cpu(), is_last_use=True
        )


def table_shards(weight: Tensor, groups: ShardingGroups) -> list[TableShard]:
    """Return all shards of a table on all ranks, alike on every rank; `tensor` is set for those of
    this rank."""
    if not isinstance(weight, ShardedTensor):
        rows, columns = weight.shape
        return [
            TableShard(r, 0, 0, rows, columns, weight if r == groups.rank else None)
            for r in range(groups.num_ranks)
        ]
    local = {tuple(s.metadata.shard_offsets): s.tensor for s in weight.local_shards()}
    shards = []
    for metadata in weight.metadata().shards_metadata:
        assert metadata.placement is not None
        # The metadata names one rank. With replicas, the rank at its position in each group has the
        # same shard.
        holder = metadata.placement.rank()
        assert holder is not None
        (row, column) = metadata.shard_offsets
        (rows, columns) = metadata.shard_sizes
        for rank in groups.same_shards(holder):
            tensor = local[tuple(metadata.shard_offsets)] if rank == groups.rank else None
            shards.append(TableShard(rank, row, column, rows, columns, tensor))
    return shards


def sharded_weights(sharded: nn.Module, tables: list[Table]) -> dict[str, Tensor]:
    """Return the weights of one sharded collection by the tables' full names; ShardedTensors that
    share memory."""
    state = sharded.state_dict()
    return {table.full_name: state[table.local_key] for table in tables}


def chunks_of(shards: list[TableShard]) -> list[Chunk]:
    """Return this rank's shards as those that a tensor in a file fills."""
    chunks = []
    for s in shards:
        if s.tensor is not None and s.tensor.numel():
            chunks.append(Chunk((s.row, s.column), s.tensor))
    return chunks


@torch.no_grad()
def redistribute(
    sources: list[TableShard], targets: list[TableShard], device: torch.device
) -> None:
    """Collective. Copy shards of one table to others, whichever ranks hold them. Sources that
    overlap are equal."""
    source_at = {(source.rank, source.rectangle): source for source in sources}
    # All ranks have the same lists, but for the tensors: they return here together, or broadcast
    # together.
    if all((target.rank, target.rectangle) in source_at for target in targets):
        for target in targets:
            if target.tensor is not None:
                for block, values in _blocks(source_at[target.rank, target.rectangle]):
                    _copy_overlap(values, block, target)
        return
    for source in _without_replicas(sources):
        for chunk, buffer in _sent(source, device):
            for target in targets:
                _copy_overlap(buffer, chunk, target)


@torch.no_grad()
def gather_rows(
    sources: list[TableShard], first: int, last: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Collective. Return rows `first` to `last` (not included) of a table on the host of every
    rank, (rows, columns).

    sources: all shards of the table on all ranks. They are sent in blocks of 64 MiB, through
    `device`.
    """
    columns = max(source.column + source.num_columns for source in sources)
    gathered = torch.empty(last - first, columns, dtype=dtype)
    target = TableShard(0, first, 0, last - first, columns, gathered)
    for source in _without_replicas(sources):
        top = max(source.row, first)
        bottom = min(source.row + source.num_rows, last)
        if top >= bottom:
            continue
        rows = source.tensor
        if rows is not None:
            rows = rows[top - source.row : bottom - source.row]
        part = replace(source, row=top, num_rows=bottom - top, tensor=rows)
        for chunk, buffer in _sent(part, device):
            _copy_overlap(buffer, chunk, target)
    return gathered


def copy_from_full(targets: list[TableShard], tensor: Tensor) -> None:
    """Copy an unsharded table that this rank holds, `tensor` (num_rows, dim), into the shards of
    this rank."""
    rows, columns = tensor.shape
    full = TableShard(0, 0, 0, rows, columns, tensor)
    for target in targets:
        _copy_overlap(tensor, full, target)


def init_rows(table: Table, targets: list[TableShard], seed: int) -> None:
    """Fill this rank's shards of a table that was built without memory, by the init function of its
    config.

    The function is called on blocks of BLOCK_ROWS rows, each with a generator seeded by the seed,
    the table and the block; the rank keeps what it holds of a block. So the values do not depend on
    ranks, threads or plan, for tables of one block whatever the function, for larger ones where it
    treats all elements alike (uniform_, normal_ ...).
    """
    name = table.full_name
    start = time.monotonic()
    next_line = PROGRESS_SECONDS
    blocks = []
    for target in targets:
        if target.tensor is not None and target.num_rows:
            end = target.row + target.num_rows
            for block in range(target.row // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
                blocks.append((target, target.tensor, block))
    num_threads = _num_threads(table, [tensor for _, tensor, _ in blocks])
    # Torch draws a tensor by one thread, and lets others run meanwhile.
    with ThreadPoolExecutor(num_threads) as pool:
        draw = partial(_draw_block, table, seed, num_threads > 1)
        drawn = pool.map(draw, blocks) if num_threads > 1 else map(draw, blocks)
        for count, _ in enumerate(drawn, 1):
            seconds = time.monotonic() - start
            if seconds > next_line and count < len(blocks):
                next_line = 2 * seconds
                rank_zero_info(
                    f"torchrec_sharded: table '{name}': rank 0 has drawn {count / len(blocks):.0%} "
                    f"of its rows in {seconds:.0f} s."
                )


def _num_threads(table: Table, tensors: list[Tensor]) -> int:
    """Return how many threads may draw: one where the init function draws by the process's only
    global generator."""
    function: Any = table.config.init_fn
    while isinstance(function, partial):
        function = function.func
    is_of_torch = getattr(function, "__module__", "") == nn.init.__name__
    if not is_of_torch or "generator" not in inspect.signature(function).parameters:
        return 1
    if any(tensor.is_cuda for tensor in tensors):
        return 1
    return max(1, min(torch.get_num_threads(), len(tensors)))


def _draw_block(
    table: Table, seed: int, uses_generator: bool, place: tuple[TableShard, Tensor, int]
) -> None:
    """Fill what a shard, with its tensor, holds of a block. uses_generator: leave the global
    generator alone."""
    (target, tensor, block) = place
    (config, name) = (table.config, table.full_name)
    fill = initial_rows(table.parameter, config.init_fn)
    start = block * BLOCK_ROWS
    rows = min(BLOCK_ROWS, config.num_embeddings - start)
    source = TableShard(target.rank, start, 0, rows, config.embedding_dim)
    first = start - target.row
    values = tensor.detach()[max(0, first) : first + rows]
    is_in_place = (
        values.shape == (rows, config.embedding_dim) and values.dtype == torch.get_default_dtype()
    )
    if not is_in_place:
        # All columns, though a column-wise shard keeps some: the draws must be those of the
        # unsharded table.
        values = torch.empty(rows, config.embedding_dim, device=tensor.device)
    # Not Python's hash, which differs between processes. 63 bits fit into torch's signed seeds.
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    block_seed = int.from_bytes(digest, "little") >> 1
    address = values.data_ptr()
    with torch.no_grad():
        if uses_generator:
            fill(values, start, generator=torch.Generator().manual_seed(block_seed))
        else:
            # Forked, so that the user's draws go on.
            with torch.random.fork_rng(devices=[values.device] if values.is_cuda else []):
                torch.manual_seed(block_seed)
                fill(values, start)
    if not is_in_place or values.data_ptr() != address:  # the function may have set `values.data`
        _copy_overlap(values, source, target)


def _without_replicas(shards: list[TableShard]) -> list[TableShard]:
    first: dict[tuple[int, int, int, int], TableShard] = {}
    for shard in shards:
        first.setdefault(shard.rectangle, shard)
    return list(first.values())


def _sent(source: TableShard, device: torch.device) -> Iterator[tuple[TableShard, Tensor]]:
    """Collective. Yield the blocks of a shard with their values, which its rank sends to all
    others."""
    for block, values in _blocks(source):
        if values is not None:
            # float32 holds half precision exactly, and copying into the target brings the bits
            # back.
            buffer = values.to(device, torch.float32).contiguous()
        else:
            buffer = torch.empty(block.num_rows, block.num_columns, device=device)
        dist.broadcast(buffer, src=block.rank)
        yield block, buffer


def _blocks(shard: TableShard) -> Iterator[tuple[TableShard, Any]]:
    """Yield a shard by CHUNK_BYTES, with the values where this rank holds it; they may be gone
    after each."""
    rows_at_once = max(1, CHUNK_BYTES // (4 * shard.num_columns))
    for first in range(0, shard.num_rows, rows_at_once):
        rows = min(rows_at_once, shard.num_rows - first)
        values = None if shard.tensor is None else shard.tensor[first : first + rows].detach()
        yield replace(shard, row=shard.row + first, num_rows=rows, tensor=None), values
        if shard.is_last_use and values is not None and values.is_contiguous():
            release_pages(values.data_ptr(), values.nbytes)


@torch.no_grad()
def _copy_overlap(values: Tensor, source: TableShard, target: TableShard) -> None:
    if target.tensor is None:
        return
    top = max(source.row, target.row)
    left = max(source.column, target.column)
    num_rows = min(source.row + source.num_rows, target.row + target.num_rows) - top
    right = min(source.column + source.num_columns, target.column + target.num_columns)
    if num_rows > 0 and right > left:
        read = values.narrow(0, top - source.row, num_rows)
        written = target.tensor.narrow(0, top - target.row, num_rows)
        read = read.narrow(1, left - source.column, right - left)
        written.narrow(1, left - target.column, right - left).copy_(read)
