"""What ranks send for tables, summed over ranks and nodes as in the whole matrix. What it is, on
real ranks: tests/multiprocess/sharding/test_traffic.py."""

import numpy as np
import pytest

from lightning_distrec.sharding.planning.traffic import (
    IDS,
    ROWS,
    Traffic,
    estimate_traffic,
)
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.support.planned import planned, planned_at_random

BATCH = 10


def one(
    sharding_type: str, layout: NodeLayout, comms: QuantizedComms | None = None, **options: object
) -> Traffic:
    """Return the traffic of one table of 24 rows and 8 columns, with 2 and 3 ids in an example's
    bags."""
    return estimate_traffic(
        [planned(sharding_type=sharding_type, layout=layout, **options)], layout, BATCH, comms
    )


def _matrix(traffic: Traffic, kind: str | None = None) -> np.ndarray:
    """Return, (num_ranks, num_ranks), what each rank sends to each other rank."""
    node = np.asarray(traffic.layout.node_of_rank)
    ranks, on_node = np.arange(len(node)), np.bincount(node)
    # The local rank. It counts only where nodes are alike, whose ranks follow one another.
    place = ranks % on_node[node]
    is_other_node = node[:, None] != node[None, :]
    same_local_rank = (place[:, None] == place[None, :]) & is_other_node
    next_on_node = ranks - place + (place + 1) % on_node[node]
    total = np.zeros((len(node), len(node)))
    for flow in traffic.flows.values() if kind is None else [traffic.flows[kind]]:
        total += flow.to_rank[None, :] + flow.from_rank[:, None]
        total[ranks, np.roll(ranks, -1)] += flow.ring
        if traffic.layout.alike:
            total[ranks, next_on_node] += flow.ring_on_node[node]
            sent = flow.to_node[node][None, :] + flow.from_node[node][:, None]
            total += same_local_rank * sent
    np.fill_diagonal(total, 0.0)
    return total


@pytest.mark.parametrize(
    "layout",
    [
        NodeLayout.equal(12, 4),
        NodeLayout.equal(8, 8),
    ],
)
@pytest.mark.parametrize("kind", [IDS, ROWS, None])
def test_sums_over_ranks_and_nodes_are_those_of_the_whole_matrix(
    layout: NodeLayout, kind: str | None
) -> None:
    traffic = planned_at_random(40, layout, seed=3).traffic
    matrix = _matrix(traffic, kind)
    if layout.num_nodes == 1:
        assert np.array_equal(traffic.matrix(kind), matrix)
    node = np.arange(layout.num_ranks) // layout.ranks_on_node
    is_equal = node[:, None] == node[None, :]
    assert not matrix.diagonal().any()
    assert traffic.sent(kind) == pytest.approx(matrix.sum(1))
    assert traffic.within_node(kind) == pytest.approx((matrix * is_equal).sum(1))
    assert traffic.across_nodes(kind) == pytest.approx((matrix * ~is_equal).sum(1))
    blocks = matrix.reshape(
        layout.num_nodes, layout.ranks_on_node, layout.num_nodes, layout.ranks_on_node
    )
    assert traffic.between_nodes(kind) == pytest.approx(blocks.sum((1, 3)))


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("layout", [NodeLayout.from_node_sizes(2, 1), NodeLayout((0, 1, 0, 1, 1))])
def test_sums_of_unlike_nodes_are_those_of_the_whole_matrix(
    sharding_type: str, layout: NodeLayout
) -> None:
    traffic = one(
        sharding_type, layout, **({"ranks": [1]} if sharding_type == "table_wise" else {})
    )
    matrix, node = _matrix(traffic), np.asarray(layout.node_of_rank)
    is_equal = node[:, None] == node[None, :]
    assert traffic.within_node() == pytest.approx((matrix * is_equal).sum(1))
    assert traffic.across_nodes() == pytest.approx((matrix * ~is_equal).sum(1))
    assert traffic.across_nodes().any()
    for a in range(layout.num_nodes):
        for b in range(layout.num_nodes):
            assert traffic.between_nodes()[a, b] == pytest.approx(
                matrix[node == a][:, node == b].sum()
            )
