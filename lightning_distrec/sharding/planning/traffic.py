"""How many bytes the ranks send each other for tables in a training step, and between which nodes.

Every exchange of lookups has one of five shapes, so that a few vectors describe it for any number
of ranks: every rank sends the same to one rank, one rank sends the same to every other, a ring of
all ranks, a ring within each node, and an exchange between the ranks with the same local rank on
each node.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.planned_table import PlannedTable
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import SMALL_ROWS

Vector = NDArray[np.float64]

IDS = "ids"
ROWS = "rows"
ROW_GRADIENTS = "row gradients"
REPLICATED_GRADIENTS = "gradients of replicated tables"
TRAFFIC_KINDS = (IDS, ROWS, ROW_GRADIENTS, REPLICATED_GRADIENTS)

SIZE_BYTES = 8
"""Of a number that says how much is sent."""
LENGTH_BYTES = 4
"""Of a bag's length."""
WEIGHT_BYTES = 4
COMM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass
class Flow:
    """Bytes of one kind in a step. Shapes: R ranks, N nodes."""

    to_rank: Vector
    """(R,): what every other rank sends to this one."""
    from_rank: Vector
    """(R,): what this rank sends to every other one."""
    ring: float
    """What every rank sends to the next in a ring of all ranks."""
    ring_on_node: Vector
    """(N,): what each rank of this node sends to the next in a ring on the node."""
    to_node: Vector
    """(N,): what every rank on another node sends to the rank with its local rank on this node."""
    from_node: Vector
    """(N,): what every rank of this node sends to the rank with its local rank on every other
    node."""


@dataclass(frozen=True)
class Traffic:
    """The bytes of a training step that tables cause. Methods take one of `TRAFFIC_KINDS`, or None
    for their sum."""

    layout: NodeLayout
    flows: Mapping[str, Flow]

    def sent(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks,), what leaves each rank."""
        sent: Vector = self._to_groups(kind, self._node_of_rank).sum(axis=1)
        return sent

    def within_node(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks,), what each rank sends to others of its node."""
        node = self._node_of_rank
        within: Vector = self._to_groups(kind, node)[np.arange(len(node)), node]
        return within

    def across_nodes(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks,), what each rank sends to other nodes."""
        node = self._node_of_rank
        to_nodes = self._to_groups(kind, node)
        to_nodes[np.arange(len(node)), node] = 0.0
        across: Vector = to_nodes.sum(axis=1)
        return across

    def between_nodes(self, kind: str | None = None) -> Vector:
        """Return, (num_nodes, num_nodes), what each node sends to each; the diagonal stays on a
        node."""
        node = self._node_of_rank
        total = np.zeros((self.layout.num_nodes, self.layout.num_nodes))
        np.add.at(total, node, self._to_groups(kind, node))
        return total

    def matrix(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks, num_ranks), what each rank of one node sends to each other rank."""
        assert self.layout.num_nodes == 1
        return self._to_groups(kind, np.arange(self.layout.num_ranks))

    @property
    def _node_of_rank(self) -> NDArray[np.intp]:
        return np.asarray(self.layout.node_of_rank, dtype=np.intp)

    def _to_groups(self, kind: str | None, groups: NDArray[np.intp]) -> Vector:
        """Return, (num_ranks, groups), what each rank sends to the other ranks of each group.

        groups: that of each rank, (num_ranks,): its node; or, on one node, itself.
        """
        node = self._node_of_rank
        ranks = np.arange(len(groups))
        sizes = np.bincount(groups)
        is_own = groups[:, None] == np.arange(len(sizes))
        next_group = groups[np.roll(ranks, -1)]
        next_on_node = next_group if self.layout.num_nodes == 1 else groups
        total = np.zeros(is_own.shape)
        flows = self.flows.values() if kind is None else [self.flows[kind]]
        for flow in flows:
            total += np.bincount(groups, flow.to_rank)
            total -= is_own * flow.to_rank[:, None]
            total += (sizes - is_own) * flow.from_rank[:, None]
            total[ranks, next_group] += flow.ring
            total[ranks, next_on_node] += flow.ring_on_node[node]
            if self.layout.num_nodes > 1:
                to_same_local_rank = flow.to_node + flow.from_node[node, None]
                total += ~is_own * to_same_local_rank
        return total


def estimate_traffic(
    tables: Iterable[PlannedTable],
    layout: NodeLayout,
    batch_size: int,
    comms: QuantizedComms | None = None,
) -> Traffic:
    """Return what a training step sends for `tables`.

    batch_size: examples per rank and step. comms: the types in which rows and their gradients are
    sent.
    Ids are assumed to be spread evenly over the rows, and collectives other than all-to-all to use
    rings. Control messages, up to 40 bytes for each lookup and pair of ranks, are not counted.
    Raises PlanError: a table has a sharding type whose exchanges are not known.
    """
    comms = comms or QuantizedComms()
    traffic = Traffic(layout, {kind: _no_flow(layout) for kind in TRAFFIC_KINDS})
    groups: dict[tuple[str, str], list[PlannedTable]] = {}
    wide = set()
    flat = set()
    for table in tables:
        # A collection's ids are sent in one tensor: one large table makes those of all its tables 8
        # bytes long.
        if table.num_rows > SMALL_ROWS:
            wide.add(table.collection)
        # Ids that are sent once have no bags: each feature of the collection is sent with one
        # length for the batch.
        if table.deduplicated:
            flat.add(table.collection)
        groups.setdefault((table.collection, table.sharding_type), []).append(table)
    for (collection, sharding_type), group in groups.items():
        if sharding_type not in _BY_TYPE:
            raise PlanError(
                f"table '{group[0].name}' is sharded {sharding_type!r}, whose exchanges are not "
                f"known. Use one of {', '.join(_BY_TYPE)}."
            )
        # Gradients of one exchange are one tensor, so that those of frozen tables are sent along.
        learns = any(table.learns for table in group)
        bags = 1 if collection in flat else batch_size
        id_bytes = 8 if collection in wide else 4
        # 0 for frozen tables: the methods add gradients without asking whether there are any.
        backward_bytes = COMM_BYTES[comms.backward] if learns else 0
        exchange = _Exchange(
            traffic, batch_size, bags, id_bytes, COMM_BYTES[comms.forward], backward_bytes
        )
        if sharding_type != "data_parallel":
            # Numbers of lengths, of ids, of weights, and the batch's size.
            words = 4 if group[0].weighted else 3
            traffic.flows[IDS].to_rank += words * SIZE_BYTES
        for table in group:
            _BY_TYPE[sharding_type](exchange, table)
    return traffic


def _no_flow(layout: NodeLayout) -> Flow:
    to_rank, from_rank = np.zeros((2, layout.num_ranks))
    ring_on_node, to_node, from_node = np.zeros((3, layout.num_nodes))
    return Flow(to_rank, from_rank, 0.0, ring_on_node, to_node, from_node)


@dataclass
class _Exchange:
    """Adds the traffic of the tables of one collection and one sharding type, table by table."""

    traffic: Traffic
    batch_size: int
    bags: int
    """Lengths of each feature."""
    id_bytes: int
    forward_bytes: int
    """Of an element that is looked up."""
    backward_bytes: int
    """Of an element of a gradient; 0 where none are sent back."""

    def all_rows(self, table: PlannedTable) -> None:
        """Send every shard all ids of its features; its columns are returned. Shards have all rows
        of some columns."""
        vectors = self._num_bags(table) if table.pooled else self._num_ids(table)
        num_ranks = self.traffic.layout.num_ranks
        shards = np.bincount(table.ranks, minlength=num_ranks)
        columns = np.bincount(table.ranks, table.shard_columns, num_ranks).astype(np.float64)
        self.traffic.flows[IDS].to_rank += shards * (self._lengths(table) + self._ids(table))
        self._back(columns * vectors)

    def row_wise(self, table: PlannedTable) -> None:
        """Send each rank the ids of its block of rows; partial sums of bags are reduced."""
        layout = self.traffic.layout
        share = _blocks(table.num_rows, layout.num_ranks)
        self.traffic.flows[IDS].to_rank += self._lengths(table) + share * self._ids(table)
        if not table.pooled:
            self._back(share * self._num_ids(table) * table.dim)
            return
        # Each rank has partial sums of the bags of all ranks: a ring passes on R - 1 blocks, each
        # of one rank's batch.
        numbers = (layout.num_ranks - 1) * self._num_bags(table) * table.dim
        self.traffic.flows[ROWS].ring += numbers * self.forward_bytes
        self.traffic.flows[ROW_GRADIENTS].ring += numbers * self.backward_bytes

    def table_row_wise(self, table: PlannedTable) -> None:
        """Exchange as row_wise on one node, then send the sums to the same local ranks of the other
        nodes."""
        layout = self.traffic.layout
        on_node = layout.ranks_on_node
        node = int(table.ranks[0]) // on_node
        node_ranks = slice(node * on_node, (node + 1) * on_node)
        ids = self._lengths(table) + _blocks(table.num_rows, on_node) * self._ids(table)
        self.traffic.flows[IDS].to_rank[node_ranks] += ids
        numbers = self._num_bags(table) * table.dim
        ring = (on_node - 1) * layout.num_nodes * numbers
        rows = self.traffic.flows[ROWS]
        gradients = self.traffic.flows[ROW_GRADIENTS]
        rows.ring_on_node[node] += ring * self.forward_bytes
        rows.from_node[node] += numbers * self.forward_bytes
        gradients.ring_on_node[node] += ring * self.backward_bytes
        gradients.to_node[node] += numbers * self.backward_bytes

    def data_parallel(self, table: PlannedTable) -> None:
        """Average the gradients over all ranks; lookups exchange nothing."""
        if table.learns:
            num_ranks = self.traffic.layout.num_ranks
            gradients = table.num_bytes
            ring = 2 * gradients * (num_ranks - 1) / num_ranks
            self.traffic.flows[REPLICATED_GRADIENTS].ring += ring

    def _back(self, numbers: Vector) -> None:
        """Return rows to all ranks and send their gradients. numbers: (num_ranks,), elements for
        each other rank."""
        self.traffic.flows[ROWS].from_rank += numbers * self.forward_bytes
        self.traffic.flows[ROW_GRADIENTS].to_rank += numbers * self.backward_bytes

    def _lengths(self, table: PlannedTable) -> float:
        return self.bags * len(table.pooling_factors) * LENGTH_BYTES

    def _ids(self, table: PlannedTable) -> float:
        id_bytes = self.id_bytes + (WEIGHT_BYTES if table.weighted else 0)
        return self._num_ids(table) * id_bytes

    def _num_ids(self, table: PlannedTable) -> float:
        num_ids = self.batch_size * sum(table.pooling_factors)
        return num_ids * table.distinct_share if table.deduplicated else num_ids

    def _num_bags(self, table: PlannedTable) -> int:
        return self.batch_size * len(table.pooling_factors)


_BY_TYPE = {
    "table_wise": _Exchange.all_rows,
    "column_wise": _Exchange.all_rows,
    "table_column_wise": _Exchange.all_rows,
    "row_wise": _Exchange.row_wise,
    "table_row_wise": _Exchange.table_row_wise,
    "data_parallel": _Exchange.data_parallel,
}


def _blocks(num_rows: int, num_ranks: int) -> Vector:
    """Return, (num_ranks,), the share of the rows in each rank's block; all but the last blocks are
    of one size."""
    # As torchrec's row-wise types: blocks of ceil(rows / ranks), and what remains for the last
    # rank.
    ends = np.minimum(np.arange(1, num_ranks + 1) * -(-num_rows // num_ranks), num_rows)
    share: Vector = np.diff(ends, prepend=0) / num_rows
    return share


FLOAT_BYTES = 4
ROW_ID_BYTES = 4


def touched_rows(rows: int, ids: float) -> float:
    """Return how many different rows `ids` evenly spread ids touch."""
    # The limit of rows * (1 - (1 - 1 / rows) ** ids) for many rows; expm1 keeps the digits of a
    # small share.
    return rows * -math.expm1(-ids / rows)


def replica_bytes(
    tables: Iterable[PlannedTable], layout: NodeLayout, batch_size: int, sync_interval: int
) -> NDArray[np.float64]:
    """Return, (R,), what each rank of a group sends to the ranks with its shards in other groups,
    in a step.

    In the mean over steps, where they meet at some only. Collectives are counted as rings.
    """
    total = np.zeros(layout.num_ranks)
    replicas = layout.num_replicas
    # Bytes sent for each byte: by a ring's all-gather, and by its all-reduce, a reduce-scatter and
    # an all-gather.
    gathered = replicas - 1.0
    reduced = 2.0 * (replicas - 1) / replicas
    for table in tables:
        if not table.learns:
            continue
        ids = batch_size * layout.num_ranks * sum(table.pooling_factors) * sync_interval
        rows = table.shard_rows
        row_bytes = FLOAT_BYTES * table.shard_columns
        shard_ids = ids * rows / table.num_rows
        state = table.shard_columns * table.update_bytes_per_element + table.update_bytes_per_row
        is_dense = table.update == "dense"
        # In each step the groups sum up gradients, which is exact. Over longer intervals rows and
        # optimizer state are averaged.
        if sync_interval == 1:
            sparse = gathered * _touched(table, shard_ids) * (ROW_ID_BYTES + row_bytes)
            sent = reduced * rows * row_bytes if is_dense else sparse
        elif is_dense:
            sent = reduced * rows * (state if table.update_bytes_per_element else row_bytes)
        else:
            row_ids = gathered * _touched(table, shard_ids) * 2 * ROW_ID_BYTES
            sent = row_ids + reduced * _touched(table, shard_ids * replicas) * (row_bytes + state)
        np.add.at(total, table.ranks, sent)
    mean_bytes: NDArray[np.float64] = total / sync_interval
    return mean_bytes


def _touched(table: PlannedTable, shard_ids: Vector) -> Vector:
    """Return, (S,), rows of each shard that this many ids touch."""
    # Two upper bounds, as in costs.py: evenly spread ids, and the share of different ids.
    even = [touched_rows(rows, ids) for rows, ids in zip(table.shard_rows, shard_ids, strict=True)]
    return np.minimum(even, shard_ids * table.distinct_share)
