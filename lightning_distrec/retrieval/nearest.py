"""The rows of a table that score highest, and the place of a target among all of them."""

import torch
from torch import Tensor
from torch.nn import functional

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics.target_ranks import target_ranks
from lightning_distrec.retrieval.full_softmax import MAX_BYTES, problem_of_call, score_dtype
from lightning_distrec.retrieval.table_rows import Block, Table, block_rows, rows_of
from lightning_distrec.sharding.weights.shard_access import without_guards, write_back


@torch.no_grad()
@without_guards
def top_k(
    queries: Tensor,
    table: Table,
    k: int,
    *,
    exclude: Tensor | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[Tensor, Tensor]:
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
    rows = rows_of("top_k", table)
    ranks = rows.ranks
    problem = problem_of_call(queries, rows, max_bytes, None, None)
    if exclude is None:
        exclude = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    fits = queries.ndim == exclude.ndim == 2 and len(exclude) == len(queries)
    if not (fits and 1 <= k <= rows.num_rows):
        problem = problem or ConfigError(
            f"k={k} must be 1 to {rows.num_rows}, queries {tuple(queries.shape)} (queries, dim), "
            f"and exclude {tuple(exclude.shape)} (queries, any number)."
        )
    dtype = torch.promote_types(score_dtype(queries, rows), torch.float32)
    equal = {"k": k, "max_bytes": max_bytes, "dtype": dtype}
    headers = ranks.agree("top_k", problem, equal, (len(queries), exclude.shape[-1]))
    counts = [count for count, _ in headers]
    width = max(width for _, width in headers)
    write_back()
    padded = functional.pad(exclude, (0, width - exclude.shape[1]), value=-1)
    all_queries = ranks.gather_rows(queries.to(dtype), counts)
    all_excluded = ranks.gather_rows(padded.long(), counts)
    scores = all_queries.new_full((len(all_queries), k), -torch.inf)
    ids = torch.full_like(scores, -1, dtype=torch.long)
    rows_per_block = block_rows(sum(counts), rows.dim, dtype, max_bytes)
    for block in rows.blocks(rows.weights, rows_per_block):
        values = rows.read(block, rows.weights).to(dtype)
        with torch.autocast(queries.device.type, enabled=False):
            block_scores = all_queries @ values.T
        block_scores = _without(block_scores, all_excluded, block)
        best, columns = block_scores.topk(min(k, block.num_rows))
        columns = torch.where(best > -torch.inf, columns + block.first, -1)
        scores, ids = _best(torch.cat([scores, best], 1), torch.cat([ids, columns], 1), k)
    # (ranks, queries, k) to (queries, ranks * k).
    received = ranks.send_rows(scores, counts).transpose(0, 1).flatten(1)
    received_ids = ranks.send_rows(ids, counts).transpose(0, 1).flatten(1)
    return _best(received, received_ids, k)


def _best(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, places = scores.topk(k)
    return best, ids.gather(1, places)


def _without(scores: Tensor, excluded: Tensor, block: Block) -> Tensor:
    """Return a block's scores with -inf for NaN and for excluded rows."""
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if not scores.numel() or not excluded.numel():
        return scores
    columns = excluded - block.first
    is_here = (columns >= 0) & (columns < block.num_rows)
    # What is not in the block changes nothing in the first column.
    limits = torch.where(is_here, -torch.inf, torch.inf).to(scores.dtype)
    return scores.scatter_reduce_(1, torch.where(is_here, columns, 0), limits, "amin")


@torch.no_grad()
@without_guards
def target_ranks_in_table(
    queries: Tensor,
    table: Table,
    targets: Tensor,
    *,
    excluded: Tensor | None = None,
    max_bytes: int = MAX_BYTES,
) -> Tensor:
    """Collective where the table is sharded. Return the rank of each target among all rows of a
    table, for metrics such as RecallAtK: see `lightning_distrec.metrics.target_ranks`.

    A table that is sharded by columns is exchanged once: each rank has whole rows for a moment.
    """
    rows = rows_of("target_ranks_in_table", table)
    write_back()
    blocks = list(rows.blocks(rows.weights, rows.num_rows))
    values = [rows.read(block, rows.weights) for block in blocks]
    numbers = [torch.arange(block.first, block.first + block.num_rows) for block in blocks]
    return target_ranks(
        queries,
        targets,
        torch.cat(values),
        rows.num_rows,
        ids=torch.cat(numbers).to(queries.device),
        excluded=excluded,
        max_bytes=max_bytes,
        group=rows.ranks.group,
    )
