"""The place of a target among all rows of a table."""

import torch
from torch import Tensor

from lightning_distrec.metrics.target_ranks import target_ranks
from lightning_distrec.sharding.scores.counted_queries import MAX_BYTES
from lightning_distrec.sharding.scores.table_rows import Table, rows_of
from lightning_distrec.sharding.weights.shard_access import without_guards, write_back


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
    values = []
    numbers = []
    for block in rows.blocks(rows.weights, rows.num_rows):
        values.append(rows.read(block, rows.weights))
        numbers.append(torch.arange(block.first, block.first + block.num_rows))
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
