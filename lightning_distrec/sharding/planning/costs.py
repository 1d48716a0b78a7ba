"""What a shard costs in a step: its ids, its exchanges, its lookups and its update.

Exchanges: bytes that leave a rank or a node, over the bandwidth that they share. What a rank keeps
does not travel. Ranks of a node share its link to other nodes: `cross_node` is what one of them
gets while all send, so that one alone gets it as many times as there are ranks. Formulas are those
of traffic.py.

Updates: on a GPU the bytes that an update reads and writes are counted. On a CPU arithmetic and
cache misses take longer than the bytes do, so costs were measured there, and are kept as bytes that
memory copies in that time: they shrink and grow with `host_memory`, as torchrec's estimates of
lookups do. Measured with torch 2.13 and fbgemm 1.8, one thread, where memory copies 13 GB/s; sums
are within 33 % of ten real fits' steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption

from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.traffic import (
    FLOAT_BYTES,
    LENGTH_BYTES,
    WEIGHT_BYTES,
    touched_rows,
)
from lightning_distrec.sharding.tables import SMALL_ROWS

MAX_DISTINCT_SHARE = 0.75
"""Up to it steps of two gloo ranks on one machine took less time with each id sent once."""
MIN_IDS = 2048
"""From it on; finding the different ones of fewer ids took what the exchange spared."""


@dataclass(frozen=True)
class BatchIds:
    """The ids of one table in a rank's batch."""

    ids: float
    distinct_share: float
    """Different ids over ids, feature by feature."""

    @property
    def repeat_enough(self) -> bool:
        """Whether sending each id once is worth the time of finding the different ones."""
        return self.ids >= MIN_IDS and self.distinct_share <= MAX_DISTINCT_SHARE


def estimate_batch_ids(
    numbers: Sequence[float], num_rows: int, counted_share: float | None
) -> BatchIds:
    """Return what was counted, or what `numbers` of ids, by feature, have that are spread evenly
    over the rows."""
    total = sum(numbers)
    if counted_share is not None:
        return BatchIds(total, counted_share)
    return BatchIds(total, sum(_looked_up(number, num_rows) for number in numbers) / total)


def _looked_up(number: float, rows: int) -> float:
    """Return how many of `rows` rows that many ids look up, if they are spread evenly."""
    # rows * (1 - (1 - 1 / rows) ** number): for millions of rows the difference has no digits left
    # without expm1 and log1p. One row is apart, because log1p(-1) is infinite.
    return 1.0 if rows == 1 else -rows * math.expm1(number * math.log1p(-1 / rows))


@dataclass(frozen=True)
class Links:
    """What ranks send over, in bytes per millisecond."""

    num_ranks: int
    ranks_on_node: int
    on_node: float
    """What a rank sends within its node."""
    node_link: float
    """What all ranks of a node send to other nodes."""
    scatter_times: int
    """By what a reduce-scatter takes longer than its bytes: gloo sums on all ranks."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.num_ranks // self.ranks_on_node

    def to_all(self, to_each: float) -> float:
        """Return the time in which one rank sends `to_each` bytes to each other rank, or gets
        them."""
        within = to_each * (self.ranks_on_node - 1) / self.on_node
        return within + to_each * (self.num_ranks - self.ranks_on_node) / self.node_link

    def ring(self, to_next: float) -> float:
        """Return a rank's share of the time in which each rank sends `to_next` bytes to the next;
        one crosses."""
        if self.num_nodes == 1:
            return to_next / self.on_node
        # One rank of a node sends across. Its time is divided among the node's ranks, because the
        # search adds their shares up to the time of the node's link.
        return to_next / self.node_link / self.ranks_on_node

    def two_levels(self, numbers: float, scatters: bool) -> float:
        """Return a rank's share of a ring on its node and of what it sends to its like on the other
        nodes."""
        times = self.scatter_times if scatters else 1
        ring = (
            times * (self.ranks_on_node - 1) * self.num_nodes * numbers * FLOAT_BYTES / self.on_node
        )
        if self.num_nodes == 1:
            return ring
        # As measured on gloo; its bytes alone do not explain it.
        times = self.scatter_times if self.ranks_on_node > 1 else 1
        across = times * (self.num_nodes - 1) * numbers * FLOAT_BYTES / self.node_link
        return ring / self.ranks_on_node + across


def make_links(topology: Topology) -> Links:
    """Return those of a topology that `make_topology` has made."""
    ranks_on_node = topology.local_world_size or 1
    bandwidths = topology.comms_bandwidths
    return Links(
        num_ranks=topology.world_size,
        ranks_on_node=ranks_on_node,
        on_node=bandwidths.intra_host_bw,
        node_link=bandwidths.inter_host_bw * ranks_on_node,
        # NCCL has a reduce-scatter of its own; gloo sums everywhere, which sends twice the bytes
        # (torch 2.13).
        scatter_times=1 if topology.compute_device == "cuda" else 2,
    )


def exchange_milliseconds(
    option: ShardingOption, constraints: TableConstraints, is_weighted: bool, links: Links
) -> NDArray[np.float64]:
    """Return, (D, 3), for each size of a shard the time of its ids, its rows and the rows'
    gradients.

    On one node it is a rank's, on several that of a node's link, which all ranks of the node wait
    for.
    """
    times = np.zeros((len(option.shards), 3))
    if links.num_ranks == 1:
        return times
    num_rows = option.tensor.shape[0]
    batch = option.batch_size
    per_example = sum(option.input_lengths)
    features = len(option.input_lengths)
    if not option.is_pooled and option.sharding_type != "data_parallel":
        ids_by_feature = [batch * factor for factor in option.input_lengths]
        repeated = estimate_batch_ids(ids_by_feature, num_rows, constraints.distinct_share)
        # Rows of repeated ids may be sent once. Bags cannot: each is a sum of its own, whatever ids
        # they share.
        per_example *= repeated.distinct_share if repeated.repeat_enough else 1
    id_bytes = (4 if num_rows <= SMALL_ROWS else 8) + (WEIGHT_BYTES if is_weighted else 0)
    for i, shard in enumerate(option.shards):
        rows, columns = shard.size
        # Ids are assumed to be spread evenly over the rows; lengths go to every shard, whatever
        # rows it has.
        ids = batch * per_example * id_bytes * rows / num_rows + batch * features * LENGTH_BYTES
        numbers = batch * columns * (features if option.is_pooled else per_example)
        kind = option.sharding_type
        if kind == "data_parallel":
            # A ring all-reduce: a reduce-scatter and an all-gather, each of (R - 1) / R of the
            # gradient's bytes.
            times[i, 2] = links.ring(
                2 * rows * columns * FLOAT_BYTES * (links.num_ranks - 1) / links.num_ranks
            )
        elif kind == "row_wise" and option.is_pooled:
            # Each rank has partial sums of all bags: rows come back by a reduce-scatter, gradients
            # by an all-gather.
            to_next = (links.num_ranks - 1) * numbers * FLOAT_BYTES
            times[i] = (
                links.to_all(ids),
                links.ring(links.scatter_times * to_next),
                links.ring(to_next),
            )
        elif kind == "table_row_wise":
            times[i] = (
                links.to_all(ids),
                links.two_levels(numbers, True),
                links.two_levels(numbers, False),
            )
        else:
            sent = numbers * FLOAT_BYTES * (rows / num_rows if kind == "row_wise" else 1)
            times[i] = links.to_all(ids), links.to_all(sent), links.to_all(sent)
    # A frozen table's rows are looked up, but no gradients of them are sent back.
    return times * (1, 1, 0) if constraints.update == "frozen" else times


MIN_GPU_DIM = 32
"""torchrec counts narrower rows as if they had this number of columns ..."""
GPU_PENALTIES = ((128, 1.0), (64, 1.15), (0, 1.75))
"""... and each row by this factor, from this number of columns on: threads of a GPU's warp have
nothing to do."""


def narrow_rows_on_cpu(sharding_type: str, columns: int) -> float:
    """Return by what a CPU's lookups of rows with `columns` columns differ from torchrec's
    estimate.

    Where shards are blocks of rows, torchrec does not count so. Measured with FBGEMM 1.8, ns an id
    at 60, 40 and 20 ids a bag: 5 to 6 of 16 columns, 20 of 32, 27 of 64, 67 of 128, about what
    memory copies in their bytes' time.
    """
    if "row" in sharding_type or sharding_type == "data_parallel":
        return 1.0
    penalty = next(factor for lower, factor in GPU_PENALTIES if columns >= lower)
    return min(columns, MIN_GPU_DIM) / MIN_GPU_DIM / penalty


# Bytes of a CPU's memory that are copied in the time of ...
CPU_FUSED_ELEMENT = 40
"""... one element of a touched row, which FBGEMM reads and writes out of order."""
CPU_FUSED_STATE = 115
"""... its Adagrad state: a square root and a division, one by one."""
CPU_SUMMED_ID = 1100
CPU_SUMMED_ELEMENT = 14
"""... one id, and one element of its gradient, that are sorted and summed into a sparse
gradient."""
CPU_SPARSE_ROW = 2400
CPU_SPARSE_ELEMENT = 26
"""... one row with state, and one element, that torch's optimizer steps on with a sparse
gradient."""
CPU_SPARSE_STATE = 185
"""... its first state: masked, gathered and scattered; a second one hardly adds to that."""
CPU_ADDED_ID = 1300
"""... one id that is added to a dense gradient."""
LARGE_BYTES = 32 * 2**20
"""The allocator returns larger tensors to the system, so that the next one is made page by page
..."""
CPU_NEW = 5
"""... in the time of copying this multiple of its bytes."""


def passes(num_states: int) -> int:
    """Return how often torch's optimizer reads or writes each element: SGD 3 times, Adagrad 11,
    Adam 19."""
    return 3 + 8 * num_states


def update_milliseconds(
    sizes: Sequence[tuple[int, int]],
    constraints: TableConstraints,
    ids: float,
    on_gpu: bool,
    bytes_per_millisecond: float,
) -> NDArray[np.float64]:
    """Return, (D,), the time of a step in which shards of these sizes, (rows, columns), are
    updated.

    ids: those that reach a shard in a step. bytes_per_millisecond: of the memory that rows are in.
    """
    kind = constraints.update
    state_bytes = constraints.bytes_per_element
    states = round(state_bytes / FLOAT_BYTES)
    share = constraints.distinct_share
    moved = []
    for rows, columns in sizes:
        # Two upper bounds: ids that are spread evenly touch the most rows, and counted ids repeat
        # as in the batches.
        touched = min(touched_rows(rows, ids), ids * (1.0 if share is None else share))
        if kind in ("fused", "fused_lazy"):
            moved.append(_fused(touched, columns, state_bytes, constraints.bytes_per_row, on_gpu))
        elif kind == "sparse":
            moved.append(_sparse(touched, columns, ids, states, on_gpu))
        elif kind == "dense":
            # The bytes of a dense update include its gradient, which is no state.
            moved.append(_dense(rows * columns, columns, ids, states - 1, on_gpu))
        else:
            moved.append(0.0)
    return np.array(moved) / bytes_per_millisecond


def _fused(
    touched: float, columns: int, state_bytes: float, row_bytes: float, on_gpu: bool
) -> float:
    if on_gpu:
        # A touched row and its state are read once and written once.
        return touched * (columns * 2 * (FLOAT_BYTES + state_bytes) + 2 * row_bytes)
    states = state_bytes / FLOAT_BYTES
    return touched * (columns * (CPU_FUSED_ELEMENT + CPU_FUSED_STATE * states) + 2 * row_bytes)


def _sparse(touched: float, columns: int, ids: float, num_states: int, on_gpu: bool) -> float:
    # On a GPU gradients are sorted and summed by reading and writing them twice.
    if on_gpu:
        return FLOAT_BYTES * columns * (4 * ids + passes(num_states) * touched)
    summed = ids * (CPU_SUMMED_ID + columns * CPU_SUMMED_ELEMENT)
    stepped = columns * (CPU_SPARSE_ELEMENT + (CPU_SPARSE_STATE if num_states else 0))
    return summed + touched * (stepped + CPU_SPARSE_ROW * num_states)


def _dense(elements: int, columns: int, ids: float, num_states: int, on_gpu: bool) -> float:
    """Count the gradient, which is filled with zeros and added to, and the step, which moves all
    rows."""
    size = FLOAT_BYTES * elements
    added = ids * (2 * FLOAT_BYTES * columns if on_gpu else CPU_ADDED_ID)
    moved = size * (1 + passes(num_states)) + added
    if not on_gpu and size >= LARGE_BYTES:
        # The gradient, and a temporary for each state, are allocated in each step.
        moved += CPU_NEW * size * (1 + num_states)
    return moved
