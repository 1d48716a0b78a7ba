"""The rows of a table in blocks: those of this rank where the table is sharded, or all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.sharding.scores.rank_group import RankGroup, ranks_of
from lightning_distrec.sharding.weights.shard_access import GuardedTable

Table = nn.Module | tuple[nn.Module, str]
"""An nn.Embedding, one table of a collection such as `self.tables.embeddings["item"]`, or a
collection and the name of its table."""
Weights = list[Tensor]


@dataclass(frozen=True)
class Block:
    """Rows that one rank has at a time."""

    first: int
    """Number of the first row in the table."""
    num_rows: int
    part: int
    """Which of the weights it is of; or the rows of each rank, where ranks exchange rows."""

    @property
    def rows(self) -> slice:
        """Where they are in the table."""
        return slice(self.first, self.first + self.num_rows)

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which ids are in the block, and their columns or 0, in the shape of `ids`."""
        columns = ids - self.first
        is_here = (columns >= 0) & (columns < self.num_rows)
        return is_here, columns.where(is_here, 0)


class TableRows:
    """A table of which this rank has whole rows: a shard of them, or all where it is unsharded.

    Its methods are given the weights: those that a function of autograd holds are not guarded.
    guarded: the sharded table.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        weights: list[Any],
        ranks: RankGroup,
        guarded: GuardedTable | None = None,
    ) -> None:
        self.name = name
        (self.num_rows, self.dim) = shape
        self.weights = weights
        self.ranks = ranks
        """Those that share the table; one where each rank has all of it."""
        self.guarded = guarded
        self._offsets = [(0, 0)]
        if guarded is not None:
            self._offsets = [(weight.place.row, weight.place.column) for weight in weights]

    def before_gradient(self) -> None:
        """A gradient of all rows comes in backward, which no update inside of it follows."""
        learns = torch.is_grad_enabled() and self.weights[0].requires_grad
        if self.guarded is not None and learns:
            self.guarded.state.before_full_gradient(self.guarded.name)

    def blocks(self, weights: Weights, rows_per_block: int) -> Iterator[Block]:
        """Yield the blocks of this rank; an empty one where it has no rows."""
        for number, weight in enumerate(weights):
            row, _ = self._offsets[number]
            num_rows = len(weight)
            for first in range(0, max(1, num_rows), rows_per_block):
                num_left = num_rows - first
                yield Block(row + first, min(rows_per_block, num_left), number)

    def read(self, block: Block, weights: Weights) -> Tensor:
        """Return the rows of a block, (num_rows, dim)."""
        row, _ = self._offsets[block.part]
        weight = weights[block.part]
        return weight.narrow(0, block.first - row, block.num_rows)

    def write(self, block: Block, rows: Tensor, weights: Weights) -> None:
        """Write rows to where a block of them lies."""
        self.read(block, weights).copy_(rows)


class ExchangedRows(TableRows):
    """A table that is sharded by columns. Ranks read a round of blocks at a time, one each.

    Each rank sends the columns that it has of a round, and receives whole rows of its block.
    """

    def blocks(self, weights: Weights, rows_per_block: int) -> Iterator[Block]:
        """Yield the blocks of this rank, as many as on every other."""
        num_ranks = self.ranks.num_ranks
        rows_per_rank = -(-self.num_rows // num_ranks)
        rows_per_block = min(rows_per_block, rows_per_rank)
        rows_per_round = rows_per_block * num_ranks
        for begin in range(0, self.num_rows, rows_per_round):
            first = begin + self.ranks.rank * rows_per_block
            num_left = max(0, self.num_rows - first)
            num_rows = min(rows_per_block, num_left)
            yield Block(first, num_rows, rows_per_block)

    def _overlaps(self, block: Block, weights: Weights, rows: Tensor) -> Iterator[list[Tensor]]:
        """Yield where the round of a block meets each shard of this rank: the shard's values and
        those in `rows` of the round."""
        begin = block.first - self.ranks.rank * block.part
        end = begin + len(rows)
        for offsets, weight in zip(self._offsets, weights, strict=True):
            row, column = offsets
            num_rows, num_columns = weight.shape
            top = max(row, begin)
            length = min(row + num_rows, end) - top
            if length > 0:
                in_rows = rows.narrow(0, top - begin, length)
                in_rows = in_rows.narrow(1, column, num_columns)
                yield [weight.narrow(0, top - row, length), in_rows]

    def read(self, block: Block, weights: Weights) -> Tensor:
        """Collective. Return the rows of a block, (num_rows, dim)."""
        counts = [block.part] * self.ranks.num_ranks
        rows = weights[0].new_zeros(sum(counts), self.dim)
        for shard, in_rows in self._overlaps(block, weights, rows):
            in_rows.copy_(shard)
        # Each value is of one rank, and 0 on the others.
        rows_of_block = self.ranks.send_rows(rows, counts).sum(0)
        return rows_of_block[: block.num_rows]

    def write(self, block: Block, rows: Tensor, weights: Weights) -> None:
        """Collective. Write each rank's block of rows to the shards that it lies in."""
        rows_of_block = weights[0].new_zeros(block.part, self.dim)
        rows_of_block[: block.num_rows] = rows
        counts = [block.part] * self.ranks.num_ranks
        all_rows = self.ranks.gather_rows(rows_of_block, counts)
        for shard, in_rows in self._overlaps(block, weights, all_rows):
            shard.copy_(in_rows)


def embedding_of(call: str, table: Table) -> nn.Module:
    """Return the module of one table. Raises ConfigError: there is none."""
    module, name = table if isinstance(table, tuple) else (table, "")
    embedding = module
    if name:
        children: Any = dict(module.named_children())
        tables = children.get("embeddings", children.get("embedding_bags", {}))
        if name not in tables:
            raise ConfigError(f"{call}: there is no table {name!r}{did_you_mean(name, tables)}")
        embedding = tables[name]
    if not isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)):
        raise ConfigError(
            f"{call}: the table is a {type(embedding).__name__}. Pass an nn.Embedding, or a "
            "collection and the name of its table: (self.tables, 'item')."
        )
    if getattr(module, "mappings", None):
        raise ConfigError(
            f"{call}: ids of the table are mapped to rows (dynamic_ids), which other ids have "
            "later: a row stands for no item. Use in_batch_loss."
        )
    return embedding


def rows_of(call: str, table: Table) -> TableRows:
    """Return the rows of a table, sharded or not. Raises ConfigError: there is no such table."""
    embedding = embedding_of(call, table)
    weight: Any = next(embedding.parameters(recurse=False))
    if hasattr(weight, "place"):
        return rows_of_guarded(weight.place.table)
    return TableRows(type(embedding).__name__, tuple(weight.shape), [weight], RankGroup())


def rows_of_guarded(table: GuardedTable) -> TableRows:
    """Return the rows of a sharded table."""
    ranks = ranks_of(table.state.group, table.state.ranks)
    kind = TableRows
    for rectangles in table.rectangles:
        for *_, num_columns in rectangles:
            if num_columns < table.shape[1]:
                kind = ExchangedRows
    return kind(table.name, table.shape, list(table.weights), ranks, table)


def block_rows(num_queries: int, dim: int, dtype: torch.dtype, max_bytes: int) -> int:
    """Return how many rows a block may have, so that scores of all queries fit into max_bytes."""
    copies = 2  # tensors of the size of the scores that exist at a time
    bytes_per_row = copies * dtype.itemsize * max(num_queries, dim)
    return max(1, max_bytes // bytes_per_row)
