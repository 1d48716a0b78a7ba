"""The rows of a table that score highest."""

import torch
from torch import Tensor
from torch.nn import functional

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.scores.counted_queries import (
    MAX_BYTES,
    bias_in_words,
    refuse_limit,
    refuse_queries,
    score_dtype,
)
from lightning_distrec.sharding.scores.rank_group import Numbers
from lightning_distrec.sharding.scores.table_rows import (
    Block,
    Table,
    TableRows,
    block_rows,
    rows_of,
)
from lightning_distrec.sharding.weights.shard_access import without_guards, write_back

Best = tuple[Tensor, Tensor]
"""Scores and numbers of rows, both (queries, k), the best first."""


def top_k(
    queries: Tensor,
    table: Table,
    k: int,
    *,
    exclude: Tensor | None = None,
    max_bytes: int = MAX_BYTES,
) -> Best:
    """Collective where the table is sharded. Return the k rows with the highest dot products, exact
    over all rows.

    Each rank finds the k best of its own rows for the queries of all ranks, block by block.

    queries: (queries, dim); ranks may have unequal numbers, or none. table: as of `softmax_loss`.
    exclude: (queries, any number), rows that do not count for a query; -1 pads.
    Returns scores, float32 or float64, and numbers of rows, both (queries, k), the best first.
    Where fewer than k rows count, the rest are -inf and -1. Which of equal scores comes first is
    not defined. NaN is a lowest score.
    Raises ConfigError on every rank: arguments do not fit.
    """
    return best_rows(rows_of("top_k", table), queries, k, exclude=exclude, max_bytes=max_bytes)


@torch.no_grad()
@without_guards
def best_rows(
    rows: TableRows,
    queries: Tensor,
    k: int,
    *,
    exclude: Tensor | None = None,
    bias: Tensor | None = None,
    max_bytes: int = MAX_BYTES,
) -> Best:
    """Collective. Return `top_k` of these rows; of one row alone (k=1) the first of equal ones."""

    def prepare() -> tuple[Tensor, Numbers]:
        refuse_limit(max_bytes)
        refuse_queries(queries, rows)
        excluded = exclude
        if excluded is None:
            excluded = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        fits = queries.ndim == excluded.ndim == 2 and 1 <= k <= rows.num_rows
        if not fits or len(excluded) != len(queries) or excluded.is_floating_point():
            raise ConfigError(
                f"k={k} must be 1 to {rows.num_rows}, queries {tuple(queries.shape)} (queries, "
                f"dim), and exclude {tuple(excluded.shape)} integers, (queries, any number)."
            )
        return excluded, (len(excluded), excluded.shape[1])

    ranks = rows.ranks
    dtype = torch.promote_types(score_dtype(queries, rows), torch.float32)
    equal = {"k": k, "max_bytes": max_bytes, "dtype": dtype, "bias": bias_in_words(bias, rows)}
    excluded, shapes = ranks.agree("top_k", equal, prepare)
    counts = [count for count, _ in shapes]
    width = max(width for _, width in shapes)
    write_back()
    padded = functional.pad(excluded, (0, width - excluded.shape[1]), value=-1)
    all_queries = ranks.gather_rows(queries.to(dtype), counts)
    all_excluded = ranks.gather_rows(padded.long(), counts)
    scores = all_queries.new_full((len(all_queries), k), -torch.inf)
    ids = torch.full_like(scores, -1, dtype=torch.long)
    rows_per_block = block_rows(sum(counts), rows.dim, dtype, max_bytes)
    for block in rows.blocks(rows.weights, rows_per_block):
        values = rows.read(block, rows.weights).to(dtype)
        with torch.autocast(queries.device.type, enabled=False):
            block_scores = all_queries @ values.T
        if bias is not None:
            block_scores += bias[block.rows]
        block_scores = _without(block_scores, all_excluded, block)
        best, columns = _highest(block_scores, min(k, block.num_rows))
        columns = torch.where(best > -torch.inf, columns + block.first, -1)
        scores = torch.cat([scores, best], 1)
        ids = torch.cat([ids, columns], 1)
        scores, ids = _best(scores, ids, k)
    # (ranks, queries, k)
    received = ranks.send_rows(scores, counts)
    received_ids = ranks.send_rows(ids, counts)
    # (queries, ranks * k)
    scores = received.transpose(0, 1).flatten(1)
    ids = received_ids.transpose(0, 1).flatten(1)
    return _best(scores, ids, k)


def _highest(scores: Tensor, k: int) -> Best:
    """Return the highest scores of each query, and their columns; one alone is the first."""
    if k == 1:
        values, columns = scores.max(1, keepdim=True)
        return values, columns
    values, columns = scores.topk(k)
    return values, columns


def _best(scores: Tensor, ids: Tensor, k: int) -> Best:
    """Return the k best of these rows; of equal ones the first in the table."""
    ids, order = ids.sort(1)
    scores = scores.gather(1, order)
    best, places = scores.sort(dim=1, descending=True, stable=True)
    best_ids = ids.gather(1, places)
    return best[:, :k], best_ids[:, :k]


def _without(scores: Tensor, excluded: Tensor, block: Block) -> Tensor:
    """Return a block's scores with -inf for NaN and for excluded rows."""
    lowest = -torch.inf
    scores = scores.nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    if not scores.numel() or not excluded.numel():
        return scores
    is_here, columns = block.columns(excluded)
    # What is not in the block changes nothing in the first column.
    limits = torch.where(is_here, lowest, torch.inf)
    return scores.scatter_reduce_(1, columns, limits.to(scores.dtype), "amin")
