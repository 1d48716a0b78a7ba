"""How long the update of a shard takes in a step: by its kind, the rows it moves, its state and the memory's speed.

On a GPU the bytes that an update reads and writes are counted. On a CPU arithmetic and cache misses take longer than
the bytes do, so costs were measured there, and are kept as bytes that memory copies in that time: they shrink and grow
with `host_memory`, as torchrec's estimates of lookups do. docs/how_to/plans.md has the measurements.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.plan.replica_traffic import FLOAT_BYTES, touched_rows

# Bytes of a CPU's memory that are copied in the time of ...
CPU_FUSED_ELEMENT = 40
"""... one element of a touched row, which FBGEMM reads and writes out of order."""
CPU_FUSED_STATE = 115
"""... its Adagrad state: a square root and a division, one by one."""
CPU_SUMMED_ID, CPU_SUMMED_ELEMENT = 1100, 14
"""... one id, and one element of its gradient, that are sorted and summed into a sparse gradient."""
CPU_SPARSE_ROW, CPU_SPARSE_ELEMENT = 2400, 26
"""... one row with state, and one element, that torch's optimizer steps on with a sparse gradient."""
CPU_SPARSE_STATE = 185
"""... its first state: masked, gathered and scattered; a second one hardly adds to that."""
CPU_ADDED_ID = 1300
"""... one id that is added to a dense gradient."""
LARGE_BYTES = 32 * 2**20
"""The allocator returns larger tensors to the system, so that the next one is made page by page ..."""
CPU_NEW = 5
"""... in the time of copying this multiple of its bytes."""


def passes(num_states: int) -> int:
    """Return how often torch's optimizer reads or writes each element: SGD 3 times, Adagrad 11, Adam 19."""
    return 3 + 8 * num_states


def update_milliseconds(
    kind: str,
    sizes: Sequence[tuple[int, int]],
    ids: float,
    bytes_per_element: float,
    bytes_per_row: float,
    on_gpu: bool,
    bytes_per_millisecond: float,
    distinct_share: float = 1.0,
) -> NDArray[np.float64]:
    """Return, (D,), the time of a step in which shards of these sizes, (rows, columns), are updated.

    kind: fused, fused_lazy, sparse, dense or frozen. ids: those that reach a shard in a step. bytes_per_element,
    bytes_per_row: what the update keeps, see TableUpdate. distinct_share: rows over ids at most,
    where batches show it.
    """
    found = np.zeros(len(sizes))
    for i, (rows, columns) in enumerate(sizes):
        touched = min(touched_rows(rows, ids), ids * distinct_share)
        if kind in ("fused", "fused_lazy"):
            moved = _fused(touched, columns, bytes_per_element, bytes_per_row, on_gpu)
        elif kind == "sparse":
            moved = _sparse(touched, columns, ids, round(bytes_per_element / FLOAT_BYTES), on_gpu)
        elif kind == "dense":
            moved = _dense(rows * columns, columns, ids, round(bytes_per_element / FLOAT_BYTES) - 1, on_gpu)
        else:
            moved = 0.0
        found[i] = moved / bytes_per_millisecond
    return found


def _fused(touched: float, columns: int, state_bytes: float, row_bytes: float, on_gpu: bool) -> float:
    if on_gpu:
        return touched * (columns * 2 * (FLOAT_BYTES + state_bytes) + 2 * row_bytes)
    states = state_bytes / FLOAT_BYTES
    return touched * (columns * (CPU_FUSED_ELEMENT + CPU_FUSED_STATE * states) + 2 * row_bytes)


def _sparse(touched: float, columns: int, ids: float, num_states: int, on_gpu: bool) -> float:
    if on_gpu:  # gradients are sorted and summed by reading and writing them twice
        return FLOAT_BYTES * columns * (4 * ids + passes(num_states) * touched)
    summed = ids * (CPU_SUMMED_ID + columns * CPU_SUMMED_ELEMENT)
    stepped = columns * (CPU_SPARSE_ELEMENT + (CPU_SPARSE_STATE if num_states else 0))
    return summed + touched * (stepped + CPU_SPARSE_ROW * num_states)


def _dense(elements: int, columns: int, ids: float, num_states: int, on_gpu: bool) -> float:
    """Count the gradient, which is filled with zeros and added to, and the step, which moves all rows."""
    size = FLOAT_BYTES * elements
    added = ids * (2 * FLOAT_BYTES * columns if on_gpu else CPU_ADDED_ID)
    moved = size * (1 + passes(num_states)) + added
    if not on_gpu and size >= LARGE_BYTES:
        moved += CPU_NEW * size * (1 + num_states)  # the gradient, and a temporary for each state
    return moved
