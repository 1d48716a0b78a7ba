"""What ranks send for tables, against sums that are written out rank by rank."""

import time

import numpy as np
import pytest

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.traffic import (
    IDS,
    REPLICATED_GRADIENTS,
    ROW_GRADIENTS,
    ROWS,
    TRAFFIC_KINDS,
    Traffic,
    estimate_traffic,
)
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.support.planned import planned, planned_at_random

BATCH = 10
SIZES = 3 * 8
"""Numbers of lengths and of ids, and the batch's size, as int64."""


def one(
    sharding_type: str, layout: NodeLayout, comms: QuantizedComms | None = None, **options: object
) -> Traffic:
    """Return the traffic of one table of 24 rows and 8 columns, with 2 and 3 ids in an example's
    bags."""
    return estimate_traffic(
        [planned(sharding_type=sharding_type, layout=layout, **options)], layout, BATCH, comms
    )


def test_ids_go_to_the_rank_of_a_whole_table_and_bags_come_back() -> None:
    traffic = one("table_wise", NodeLayout.equal(3, 3), ranks=[1])
    ids = 2 * BATCH * 4 + (2 + 3) * BATCH * 4  # lengths, and ids
    assert traffic.sent(IDS).tolist() == [2 * SIZES + ids, 2 * SIZES, 2 * SIZES + ids]
    assert traffic.sent(ROWS).tolist() == [0, 2 * (2 * BATCH * 8 * 4), 0]
    assert traffic.sent(ROW_GRADIENTS).tolist() == [2 * BATCH * 8 * 4, 0, 2 * BATCH * 8 * 4]


def test_single_rows_come_back_for_every_id() -> None:
    traffic = one("table_wise", NodeLayout.equal(2, 2), ranks=[0], pooled=False)
    assert traffic.sent(ROWS).tolist() == [(2 + 3) * BATCH * 8 * 4, 0]


def test_weights_travel_with_ids() -> None:
    plain, weighted = (
        one("table_wise", NodeLayout.equal(2, 2), ranks=[0], weighted=w) for w in (False, True)
    )
    assert (weighted.sent(IDS) - plain.sent(IDS)).tolist() == [8, 8 + (2 + 3) * BATCH * 4]


def test_ids_of_a_table_cut_by_rows_follow_the_sizes_of_the_blocks() -> None:
    traffic = one("row_wise", NodeLayout.equal(3, 3), num_rows=10)  # blocks of 4, 4 and 2 rows
    lengths, ids = 2 * BATCH * 4, (2 + 3) * BATCH * 4
    target = [SIZES + lengths + ids * share for share in (0.4, 0.4, 0.2)]
    assert traffic.sent(IDS) == pytest.approx([
        target[1] + target[2],
        target[0] + target[2],
        target[0] + target[1],
    ])
    assert traffic.sent(ROWS).tolist() == [2 * 2 * BATCH * 8 * 4] * 3


def test_two_level_cuts_add_up_on_a_node_and_cross_nodes_once() -> None:
    traffic = one("table_row_wise", NodeLayout.equal(4, 2), ranks=[2, 3])
    bags = 2 * BATCH * 8 * 4  # of one rank's examples
    # sums for both nodes, halved in a ring
    assert traffic.within_node(ROWS).tolist() == [0, 0, 2 * bags, 2 * bags]
    assert traffic.across_nodes(ROWS).tolist() == [0, 0, bags, bags]
    assert traffic.across_nodes(ROW_GRADIENTS).tolist() == [bags, bags, 0, 0]


def test_whole_tables_on_all_ranks_send_their_gradients_only() -> None:
    traffic = one("data_parallel", NodeLayout.equal(4, 2), update="dense")
    assert all(not traffic.sent(kind).any() for kind in (IDS, ROWS, ROW_GRADIENTS))
    assert traffic.sent(REPLICATED_GRADIENTS).tolist() == [2 * 3 / 4 * 24 * 8 * 4] * 4
    assert traffic.across_nodes().tolist() == [0, 288 * 4, 0, 288 * 4]


def test_frozen_tables_send_no_gradients_unless_one_beside_them_learns() -> None:
    layout = NodeLayout.equal(2, 2)
    frozen, learns = (
        planned(sharding_type="table_wise", layout=layout, ranks=[0], update=u)
        for u in ("frozen", "fused")
    )
    assert not estimate_traffic([frozen], layout, BATCH).sent(ROW_GRADIENTS).any()
    pair = estimate_traffic([frozen, learns], layout, BATCH)
    assert pair.sent(ROW_GRADIENTS).tolist() == pair.sent(ROWS)[::-1].tolist()


def test_rounded_rows_and_gradients_are_half_as_many_bytes() -> None:
    layout = NodeLayout.equal(4, 2)
    for sharding_type in ("table_wise", "row_wise", "table_row_wise"):
        exact, rounded = (
            one(sharding_type, layout, comms) for comms in (None, QuantizedComms(forward="bf16"))
        )
        assert (2 * rounded.sent(ROWS)).tolist() == exact.sent(ROWS).tolist()
        assert rounded.sent(ROW_GRADIENTS).tolist() == exact.sent(ROW_GRADIENTS).tolist()
        assert rounded.sent(IDS).tolist() == exact.sent(IDS).tolist()


def test_one_rank_sends_nothing() -> None:
    layout = NodeLayout.equal(1, 1)
    traffic = estimate_traffic(
        [planned(sharding_type=c, layout=layout) for c in ("table_wise", "row_wise")], layout, BATCH
    )
    assert traffic.sent().tolist() == [0]
    assert traffic.between_nodes().tolist() == [[0]]


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
        NodeLayout.equal(6, 3),
        NodeLayout.equal(8, 8),
        NodeLayout.equal(4, 1),
    ],
)
@pytest.mark.parametrize("kind", [*TRAFFIC_KINDS, None])
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


@pytest.mark.slow
def test_thousands_of_ranks_take_no_time_per_pair() -> None:
    facts = planned_at_random(1000, NodeLayout.equal(4096, 8), seed=0)
    begin = time.process_time()
    traffic = facts.traffic
    assert traffic.sent().shape == traffic.across_nodes().shape == (4096,)
    assert traffic.between_nodes().shape == (512, 512)
    assert time.process_time() - begin < 5


def test_a_cut_whose_exchanges_are_not_known_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"table 'ebc.t' is sharded 'grid_shard', whose exchanges are not known. Use one of",
    ):
        one("grid_shard", NodeLayout.equal(4, 2))
