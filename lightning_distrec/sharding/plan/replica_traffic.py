"""How many bytes the ranks send for replicas of the tables, where each of several groups of ranks has one."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.node_layout import NodeLayout
from lightning_distrec.sharding.plan.planned_table import PlannedTable

FLOAT_BYTES = 4
ROW_ID_BYTES = 4


def touched_rows(rows: int, ids: float) -> float:
    """Return how many different rows `ids` evenly spread ids touch."""
    return rows * -math.expm1(-ids / rows)


def replica_bytes(
    tables: Iterable[PlannedTable], layout: NodeLayout, batch_size: int, sync_interval: int
) -> NDArray[np.float64]:
    """Return, (R,), what each rank of a group sends to the ranks with its shards in other groups, in a step.

    In the mean over steps, where they meet at some only. batch_size: examples per rank and step. Collectives are
    counted as rings.
    """
    total, replicas = np.zeros(layout.num_ranks), layout.num_replicas
    gathered, reduced = replicas - 1.0, 2.0 * (replicas - 1) / replicas
    for table in tables:
        if not table.learns:
            continue
        ids = batch_size * layout.num_ranks * sum(table.pooling_factors) * sync_interval
        for rank, rows, columns in zip(table.ranks, table.shard_rows, table.shard_columns, strict=True):
            here = ids * rows / table.num_rows
            distinct = 1.0 if table.data is None else table.data.distinct_share
            touched = min(touched_rows(rows, here), here * distinct)
            of_all = min(touched_rows(rows, here * replicas), here * replicas * distinct)
            row_bytes = FLOAT_BYTES * columns
            if sync_interval == 1:
                sparse = gathered * touched * (ROW_ID_BYTES + row_bytes)
                total[rank] += reduced * rows * row_bytes if table.update == "dense" else sparse
                continue
            state = columns * table.update_bytes_per_element + table.update_bytes_per_row
            if table.update == "dense":
                total[rank] += reduced * rows * (state if table.update_bytes_per_element else row_bytes)
            else:
                total[rank] += gathered * touched * 2 * ROW_ID_BYTES
                total[rank] += reduced * of_all * (row_bytes + state)
    found: NDArray[np.float64] = total / sync_interval
    return found
