"""The rows of a table in blocks: those of this rank where the table is sharded, or all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.retrieval.rank_group import RankGroup, ranks_of

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


class TableRows:
    """A table of which this rank has whole rows: a shard of them, or all where it is unsharded.

    Its methods are given the weights: those that a function of autograd holds are not guarded.
    """

    def __init__(
        self, name: str, shape: tuple[int, int], weights: list[Any], ranks: RankGroup
    ) -> None:
        self.name = name
        (self.num_rows, self.dim) = shape
        self.weights = weights
        self.ranks = ranks
        """Those that share the table; one where each rank has all of it."""
        self._offsets = [(0, 0)]
        if is_shard(weights[0]):
            self._offsets = [(weight.place.row, weight.place.column) for weight in weights]

    def blocks(self, weights: Weights, rows_per_block: int) -> Iterator[Block]:
        """Yield the blocks of this rank; an empty one where it has no rows."""
        for number, weight in enumerate(weights):
            row, _ = self._offsets[number]
            for first in range(0, max(1, len(weight)), rows_per_block):
                yield Block(row + first, min(rows_per_block, len(weight) - first), number)

    def read(self, block: Block, weights: Weights) -> Tensor:
        """Return the rows of a block, (num_rows, dim)."""
        first = block.first - self._offsets[block.part][0]
        return weights[block.part][first : first + block.num_rows]

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
        rows_per_block = min(rows_per_block, -(-self.num_rows // num_ranks))
        for first in range(0, self.num_rows, rows_per_block * num_ranks):
            first += self.ranks.rank * rows_per_block
            count = max(0, min(rows_per_block, self.num_rows - first))
            yield Block(first, count, rows_per_block)

    def _overlaps(self, block: Block, weights: Weights, rows: Tensor) -> Iterator[list[Tensor]]:
        """Yield where the round of a block meets each shard of this rank: the shard's values and
        those in `rows` of the round."""
        begin = block.first - self.ranks.rank * block.part
        for (row, column), weight in zip(self._offsets, weights, strict=True):
            top = max(row, begin)
            bottom = min(row + len(weight), begin + len(rows))
            if top < bottom:
                in_rows = rows[top - begin : bottom - begin, column : column + weight.shape[1]]
                yield [weight[top - row : bottom - row], in_rows]

    def read(self, block: Block, weights: Weights) -> Tensor:
        """Collective. Return the rows of a block, (num_rows, dim)."""
        rows = weights[0].new_zeros(self.ranks.num_ranks * block.part, self.dim)
        for shard, in_rows in self._overlaps(block, weights, rows):
            in_rows.copy_(shard)
        # Each value is of one rank, and 0 on the others.
        rows_of_block = self.ranks.send_rows(rows, [block.part] * self.ranks.num_ranks).sum(0)
        return rows_of_block[: block.num_rows]

    def write(self, block: Block, rows: Tensor, weights: Weights) -> None:
        """Collective. Write each rank's block of rows to the shards that it lies in."""
        rows_of_block = weights[0].new_zeros(block.part, self.dim)
        rows_of_block[: block.num_rows] = rows
        all_rows = self.ranks.gather_rows(rows_of_block, [block.part] * self.ranks.num_ranks)
        for shard, in_rows in self._overlaps(block, weights, all_rows):
            shard.copy_(in_rows)


def is_shard(weight: Tensor) -> bool:
    """Whether this weight is a shard of a table that is on several ranks."""
    return hasattr(weight, "place")


def embedding_of(call: str, table: Table) -> nn.Module:
    """Return the module of one table. Raises ConfigError: there is none."""
    module, name = table if isinstance(table, tuple) else (table, "")
    children: Any = dict(module.named_children())
    embeddings = children.get("embeddings", children.get("embedding_bags", {}))
    if name and name not in embeddings:
        raise ConfigError(f"{call}: there is no table {name!r}{did_you_mean(name, embeddings)}")
    embedding = embeddings[name] if name else module
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
    weights: list[Any] = list(embedding.parameters(recurse=False))
    if not is_shard(weights[0]):
        shape = tuple(weights[0].shape)
        return TableRows(type(embedding).__name__, shape, weights[:1], RankGroup())
    guarded = weights[0].place.table
    widths = {width for shards in guarded.rectangles for *_, width in shards}
    kind = TableRows if widths == {guarded.shape[1]} else ExchangedRows
    ranks = ranks_of(guarded.state.group)
    return kind(guarded.name, guarded.shape, list(guarded.weights), ranks)


def block_rows(num_queries: int, dim: int, dtype: torch.dtype, max_bytes: int) -> int:
    """Return how many rows a block may have, so that scores of all queries fit into max_bytes."""
    copies = 2  # tensors of the size of the scores that exist at a time
    return max(1, max_bytes // (copies * dtype.itemsize * max(num_queries, dim)))
