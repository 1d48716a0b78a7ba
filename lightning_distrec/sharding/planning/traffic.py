"""How many bytes the ranks send one another in a training step for their tables, and between which nodes.

Everything that lookups exchange has one of five shapes, so that a few vectors hold it for any number of ranks:
every rank sends the same to one rank, one rank sends the same to every other, a ring of all ranks, a ring within each
node, and ranks of one place on their nodes with each other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.planned_tables import PlannedTable
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.quantized_comms import QuantizedComms

Vector = NDArray[np.float64]

IDS = "ids"
ROWS = "rows"
ROW_GRADIENTS = "row gradients"
WHOLE_GRADIENTS = "gradients of whole tables"
TRAFFIC_KINDS = (IDS, ROWS, ROW_GRADIENTS, WHOLE_GRADIENTS)

WORD_BYTES = 8
"""Ids, lengths of bags, and how many of them are sent travel as int64."""
WEIGHT_BYTES = 4
TRAVEL_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass
class Flow:
    """Bytes of one kind in a step. Shapes: R ranks, N nodes."""

    to_rank: Vector
    """(R,): what every other rank sends to this one."""
    from_rank: Vector
    """(R,): what this rank sends to every other one."""
    ring: float
    """What every rank hands on to the next in a ring of all."""
    ring_on_node: Vector
    """(N,): what the ranks of this node hand on to each other in a ring."""
    to_node: Vector
    """(N,): what every rank on another node sends to the one of its place on this node."""
    from_node: Vector
    """(N,): what every rank of this node sends to the one of its place on every other node."""


@dataclass(frozen=True)
class Traffic:
    """The bytes of a training step that tables cause. Methods take one of `TRAFFIC_KINDS`, or None for their sum."""

    places: NodeLayout
    flows: Mapping[str, Flow]

    def sent(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks,), what leaves each rank."""
        return self.within_node(kind) + self.across_nodes(kind)

    def within_node(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks,), what each rank sends to others of its node."""
        node, on_node, stays = self._nodes()
        total = np.zeros(len(node))
        for flow in self._flows(kind):
            to_own_node = np.bincount(node, flow.to_rank)[node]
            total += to_own_node - flow.to_rank + flow.from_rank * (on_node[node] - 1)
            total += np.where(stays, flow.ring, 0.0) + flow.ring_on_node[node]
        return total

    def across_nodes(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks,), what each rank sends to other nodes."""
        node, on_node, stays = self._nodes()
        total = np.zeros(len(node))
        for flow in self._flows(kind):
            to_nodes = np.bincount(node, flow.to_rank)
            total += to_nodes.sum() - to_nodes[node] + flow.from_rank * (len(node) - on_node[node])
            total += np.where(stays, 0.0, flow.ring)
            by_place = flow.to_node.sum() - flow.to_node + flow.from_node * (len(on_node) - 1)
            total += by_place[node]
        return total

    def between_nodes(self, kind: str | None = None) -> Vector:
        """Return, (num_nodes, num_nodes), what each node's ranks send to each node's; the diagonal stays on a node."""
        node, on_node, _ = self._nodes()
        total = np.zeros((len(on_node), len(on_node)))
        for flow in self._flows(kind):
            total += on_node[:, None] * np.bincount(node, flow.to_rank)[None, :]
            total += np.bincount(node, flow.from_rank)[:, None] * on_node[None, :]
            total += on_node[:, None] * (flow.to_node[None, :] + flow.from_node[:, None])
            np.add.at(total, (node, np.roll(node, -1)), flow.ring)
        np.fill_diagonal(total, np.bincount(node, self.within_node(kind)))
        return total

    def matrix(self, kind: str | None = None) -> Vector:
        """Return, (num_ranks, num_ranks), what each rank sends to each; large where there are many."""
        node, on_node, _ = self._nodes()
        ranks = np.arange(len(node))
        total = np.zeros((len(node), len(node)))
        sender, receiver = np.meshgrid(ranks, ranks, indexing="ij")
        place = ranks % on_node[node]  # where it counts, nodes are alike, and their ranks follow one another
        same_place = (place[sender] == place[receiver]) & (node[sender] != node[receiver])
        next_on_node = ranks - place + (place + 1) % on_node[node]
        for flow in self._flows(kind):
            total += flow.to_rank[None, :] + flow.from_rank[:, None]
            total[ranks, np.roll(ranks, -1)] += flow.ring
            if self.places.alike:
                total[ranks, next_on_node] += flow.ring_on_node[node]
                total += same_place * (flow.to_node[node][None, :] + flow.from_node[node][:, None])
        np.fill_diagonal(total, 0.0)
        return total

    def _flows(self, kind: str | None) -> list[Flow]:
        return list(self.flows.values()) if kind is None else [self.flows[kind]]

    def _nodes(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Return the ranks' nodes, (R,); how many each has, (N,); whether the next rank is there too, (R,)."""
        node = np.asarray(self.places.node_of_rank, dtype=np.intp)
        return node, np.bincount(node), node == np.roll(node, -1)


def estimate_traffic(
    tables: Iterable[PlannedTable], places: NodeLayout, batch_size: int, comms: QuantizedComms | None = None
) -> Traffic:
    """Return what a training step sends for `tables`.

    batch_size: examples per rank and step. comms: the types in which rows and their gradients travel.
    Where ids go depends on their values for cuts by rows; they are taken to be spread evenly over the rows. What ranks
    agree on beside their exchanges, up to 40 bytes for each lookup and pair of ranks, is not counted. Collectives that
    are no exchange of all with all are taken to go around in a ring.
    Raises PlanError: a table is cut in a way whose exchanges are not known.
    """
    comms = comms or QuantizedComms()
    num_ranks, num_nodes = places.num_ranks, places.num_nodes
    traffic = Traffic(places, {kind: _no_flow(num_ranks, num_nodes) for kind in TRAFFIC_KINDS})
    groups: dict[tuple[str, str], list[PlannedTable]] = {}
    for table in tables:
        groups.setdefault((table.collection, table.cut), []).append(table)
    for (_, cut), group in groups.items():
        if cut not in _CUTS:
            raise PlanError(
                f"table '{group[0].name}' is cut {cut!r}, whose exchanges are not known. Use one of {', '.join(_CUTS)}."
            )
        exchange = _Exchange(traffic, batch_size, comms, learns=any(table.learns for table in group))
        if cut != "data_parallel":
            words = 4 if group[0].weighted else 3  # numbers of lengths, of ids, of weights, and the batch's size
            traffic.flows[IDS].to_rank += words * WORD_BYTES
        for table in group:
            _CUTS[cut](exchange, table)
    if num_ranks == 1:
        return Traffic(places, {kind: _no_flow(1, 1) for kind in TRAFFIC_KINDS})
    return traffic


def _no_flow(num_ranks: int, num_nodes: int) -> Flow:
    ranks, nodes = np.zeros(num_ranks), np.zeros(num_nodes)
    return Flow(ranks.copy(), ranks.copy(), 0.0, nodes.copy(), nodes.copy(), nodes.copy())


@dataclass
class _Exchange:
    """What tables of one collection that are cut alike add to the traffic, table by table."""

    traffic: Traffic
    batch_size: int
    comms: QuantizedComms
    learns: bool
    """Whether gradients come back: for all of them together, or for none."""
    forward_bytes: int = field(init=False)
    backward_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.forward_bytes = TRAVEL_BYTES[self.comms.forward]
        self.backward_bytes = TRAVEL_BYTES[self.comms.backward] if self.learns else 0

    def whole_rows(self, table: PlannedTable) -> None:
        """Each shard has whole columns: all its features' ids come, and its columns go back."""
        vectors = len(table.pooling_factors) if table.pooled else sum(table.pooling_factors)
        bytes_in = self._lengths(table) + self._ids(table)
        num_ranks = self.traffic.places.num_ranks
        shards = np.bincount(table.ranks, minlength=num_ranks)
        columns: Vector = np.bincount(table.ranks, table.shard_columns, minlength=num_ranks).astype(np.float64)
        self.traffic.flows[IDS].to_rank += shards * bytes_in
        self._back(columns * float(vectors * self.batch_size))

    def row_wise(self, table: PlannedTable) -> None:
        """Each rank has a block of rows: its share of the ids comes; of bags, partial sums are added up."""
        places = self.traffic.places
        share = _blocks(table.num_rows, places.num_ranks)
        self.traffic.flows[IDS].to_rank += self._lengths(table) + share * self._ids(table)
        if not table.pooled:
            self._back(share * sum(table.pooling_factors) * self.batch_size * table.dim)
            return
        numbers = (places.num_ranks - 1) * self.batch_size * table.dim * len(table.pooling_factors)
        self.traffic.flows[ROWS].ring += numbers * self.forward_bytes
        self.traffic.flows[ROW_GRADIENTS].ring += numbers * self.backward_bytes

    def table_row_wise(self, table: PlannedTable) -> None:
        """As row_wise on the ranks of one node; the sums then go to the ranks of the same place on each node."""
        places = self.traffic.places
        on_node = places.num_ranks // places.num_nodes
        node = int(table.ranks[0]) // on_node
        here = slice(node * on_node, (node + 1) * on_node)
        share = _blocks(table.num_rows, on_node)
        self.traffic.flows[IDS].to_rank[here] += self._lengths(table) + share * self._ids(table)
        numbers = self.batch_size * table.dim * len(table.pooling_factors)
        rows, gradients = self.traffic.flows[ROWS], self.traffic.flows[ROW_GRADIENTS]
        rows.ring_on_node[node] += (on_node - 1) * places.num_nodes * numbers * self.forward_bytes
        rows.from_node[node] += numbers * self.forward_bytes
        gradients.ring_on_node[node] += (on_node - 1) * places.num_nodes * numbers * self.backward_bytes
        gradients.to_node[node] += numbers * self.backward_bytes

    def data_parallel(self, table: PlannedTable) -> None:
        """Nothing is exchanged for lookups; gradients are averaged over all ranks."""
        if table.learns:
            num_ranks = self.traffic.places.num_ranks
            gradients = table.num_bytes
            self.traffic.flows[WHOLE_GRADIENTS].ring += 2 * gradients * (num_ranks - 1) / num_ranks

    def _back(self, numbers: Vector) -> None:
        """Rows go back to all ranks, and their gradients come. numbers: (num_ranks,), for each of the others."""
        self.traffic.flows[ROWS].from_rank += numbers * self.forward_bytes
        self.traffic.flows[ROW_GRADIENTS].to_rank += numbers * self.backward_bytes

    def _lengths(self, table: PlannedTable) -> float:
        return self.batch_size * len(table.pooling_factors) * WORD_BYTES

    def _ids(self, table: PlannedTable) -> float:
        id_bytes = WORD_BYTES + (WEIGHT_BYTES if table.weighted else 0)
        return self.batch_size * sum(table.pooling_factors) * id_bytes


_CUTS = {
    "table_wise": _Exchange.whole_rows,
    "column_wise": _Exchange.whole_rows,
    "table_column_wise": _Exchange.whole_rows,
    "row_wise": _Exchange.row_wise,
    "table_row_wise": _Exchange.table_row_wise,
    "data_parallel": _Exchange.data_parallel,
}


def _blocks(num_rows: int, num_ranks: int) -> Vector:
    """Return, (num_ranks,), the share of the rows in each rank's block; all but the last blocks are of one size."""
    ends = np.minimum(np.arange(1, num_ranks + 1) * -(-num_rows // num_ranks), num_rows)
    share: Vector = np.diff(ends, prepend=0) / num_rows
    return share
