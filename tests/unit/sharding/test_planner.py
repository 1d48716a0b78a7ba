"""Plans: torchrec's estimates, a critical path no longer than its own planner's, and proofs where
nothing fits."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Perf

from lightning_distrec._compat.torchrec_modules import silence_torchrec
from lightning_distrec.errors import InfeasiblePlanError, PlanError
from lightning_distrec.sharding.planning.constraints import torchrec_constraint
from lightning_distrec.sharding.planning.partial_plan import MemoryBudget, PartialPlan
from lightning_distrec.sharding.planning.sharding_plan import (
    EXCHANGE_PARTS,
    NOT_ESTIMATED,
    TIME_PARTS,
    ShardingPlan,
)
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.planning.traffic import IDS, ROW_GRADIENTS, ROWS
from lightning_distrec.sharding.sharders import SHARDING_TYPES, sharders
from tests.support.parameters import slow_except
from tests.support.planned_tables import (
    KINDS,
    TableSet,
    default_critical_path,
    draw_tables,
    table_set,
)


def planned(tables: TableSet, seed: int = 0) -> ShardingPlan:
    return tables.planner().make_plan(seed)


def places(made: ShardingPlan) -> dict[str, tuple[str, str, list[int]]]:
    return {
        name: (s.sharding_type, s.compute_kernel, s.ranks.tolist())
        for name, s in made.tables.items()
    }


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_options_have_the_shards_and_lookups_of_torchrecs_enumerator(device: str) -> None:
    every = {
        i: TableOptions(sharding_types=[kind], pooling_factor=3.0)
        for i, kind in enumerate(SHARDING_TYPES)
    }
    sizes = [(10_001, 256), (5_003, 128), (7_777, 512), (1_001, 128), (9_999, 384), (501, 16)]
    tables = table_set(sizes, 4, 2, 1.0, device=device, options=every)  # type: ignore[arg-type]
    constraints = {
        t.name: torchrec_constraint(t, tables.constraints[t.full_name]) for t in tables.tables
    }
    tree = nn.Module()
    tree.ebc = tables.tables[0].module
    with silence_torchrec():
        enumerator = EmbeddingEnumerator(tables.topology, tables.batch_size, constraints)
        stock = enumerator.enumerate(tree, sharders())
    expected = {
        (o.name, o.sharding_type, o.compute_kernel): [
            (tuple(s.size), tuple(s.offset), _lookups(s.perf), s.storage.hbm, s.storage.ddr)
            for s in o.shards
        ]
        for o in stock
    }
    distrec = {}
    for table, options in zip(
        tables.tables,
        tables.planner().estimated_options(),
        strict=True,
    ):
        for c in options:
            hbm, ddr = (
                (c.device_bytes, c.host_bytes)
                if device == "cuda"
                else (c.host_bytes, c.device_bytes)
            )
            updates = c.milliseconds_by_part[c.size_numbers, TIME_PARTS.index("update")]
            distrec[table.name, c.sharding_type, c.kernel] = [
                (size, offset, pytest.approx(time, rel=1e-9), on_device, on_host)
                for size, offset, time, on_device, on_host in zip(
                    c.sizes, c.offsets, c.compute - updates, hbm, ddr, strict=True
                )
            ]
    assert len(expected) >= 6
    assert distrec == expected


def _lookups(perf: Perf) -> float:
    return float(perf.fwd_compute + perf.bwd_compute + perf.prefetch_compute)


@pytest.mark.parametrize(("num_ranks", "on_node"), [(6, 2), (3, 3)])
def test_exchanges_take_the_time_of_the_bytes_that_leave_a_rank_or_a_node(
    num_ranks: int, on_node: int
) -> None:
    several = num_ranks > on_node
    kinds = [kind for kind in SHARDING_TYPES if kind != "data_parallel"]
    for kind in kinds if several else ("table_wise", "column_wise", "row_wise"):
        first = {0: TableOptions(sharding_types=[kind], pooling_factor=3.0, min_partition=64)}
        tables = table_set([(12_000, 256)], num_ranks, on_node, 1.0, options=first)
        made = planned(tables)
        bandwidths = tables.topology.comms_bandwidths
        link = bandwidths.inter_host_bw * on_node if several else bandwidths.intra_host_bw
        phases = 0.0
        for traffic_kind in (IDS, ROWS, ROW_GRADIENTS):
            moved = (
                made.traffic.between_nodes(traffic_kind)
                if several
                else made.traffic.matrix(traffic_kind)
            )
            away = moved - np.diag(moved.diagonal())
            phases += max(away.sum(axis=0).max(), away.sum(axis=1).max())
        assert made.cost.milliseconds[:, EXCHANGE_PARTS].max(axis=0).sum() == pytest.approx(
            phases / link, rel=0.05
        )


def test_a_step_waits_in_each_exchange_for_its_slowest_rank() -> None:
    milliseconds = np.array([[1, 5, 1, 1, 0, 2, 3], [4, 1, 1, 6, 0, 1, 1]], dtype=float)
    cost = replace(NOT_ESTIMATED, milliseconds=milliseconds)
    assert cost.critical_path == 5 + 6 + 2 + max(1 + 1 + 3, 4 + 1 + 1)
    assert cost.milliseconds_by_rank.max() < cost.critical_path


SMALL = [(kind, *shape) for kind in KINDS for shape in ((6, 2, 2, 16), (8, 4, 2, 24))]


@pytest.mark.parametrize("seed", slow_except(range(0, len(SMALL), 6), range(len(SMALL))))
def test_the_critical_path_is_no_longer_than_that_of_torchrecs_planner(seed: int) -> None:
    kind, num_tables, num_ranks, on_node, memory = SMALL[seed]
    tables = draw_tables(kind, num_tables, num_ranks, on_node, memory, seed)
    made = planned(tables)
    assert made.cost.lower_bound is not None
    assert made.cost.lower_bound <= made.cost.critical_path * (1 + 1e-9)
    assert made.cost.critical_path <= default_critical_path(tables) * (1 + 1e-9)


@pytest.mark.parametrize("kind", slow_except(KINDS[:1], KINDS))
def test_a_plan_keeps_to_the_memory_and_costs_what_its_shards_cost(kind: str) -> None:
    tables = draw_tables(kind, 10, 4, 2, 9 if kind != "tiny" else 0.5, 3)  # type: ignore[arg-type]
    made = planned(tables)
    cost = made.cost
    assert (cost.device_bytes <= cost.device_bytes_usable).all()
    assert (cost.host_bytes <= cost.host_bytes_usable).all()
    repeated = tables.planner().estimate(made).cost
    np.testing.assert_allclose(repeated.milliseconds, cost.milliseconds)
    np.testing.assert_array_equal(repeated.device_bytes, cost.device_bytes)
    np.testing.assert_array_equal(repeated.host_bytes, cost.host_bytes)


def test_the_search_ends_when_its_moves_have_cost_what_they_can_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = []
    load = PartialPlan.load
    monkeypatch.setattr(PartialPlan, "load", lambda *a: loads.append(1) or load(*a))
    made = planned(draw_tables("uniform", 10, 2, 2, 10.4, 1))
    assert made.cost.lower_bound is not None
    assert made.cost.critical_path <= 1.02 * made.cost.lower_bound
    assert len(loads) < 6000  # 40,000 without an end


def test_what_the_update_keeps_counts_as_memory() -> None:
    sizes = [(1_000_000, 64)] * 2  # 256 MB of rows each
    tables = table_set(sizes, 2, 2, 1.02, device="cpu")
    assert sorted(ranks for _, _, ranks in places(planned(tables)).values()) == [[0], [1]]
    retained = {"sharding_types": ("table_wise",), "bytes_per_element": 12.0}
    heavy = {name: replace(c, **retained) for name, c in tables.constraints.items()}
    with pytest.raises(
        PlanError, match=r"table 'ebc.t0' fits on no rank: even table_wise \(fused\) a rank needs"
    ):
        replace(tables, constraints=heavy).planner().make_plan()


def test_a_table_that_fits_nowhere_is_named_with_the_bytes_that_are_missing() -> None:
    only_whole = {1: TableOptions(sharding_types=["table_wise"])}
    tables = table_set([(1000, 64), (1_000_000, 64)], 2, 2, 0.2, device="cpu", options=only_whole)
    with pytest.raises(PlanError) as error:
        planned(tables)
    message = re.search(
        r"table 'ebc.t1' fits on no rank: .* needs ([\d.]+) MiB .* has ([\d.]+) MiB: ([\d.]+) MiB too few",
        str(error.value),
    )
    assert message is not None
    needs, has, missing = map(float, message.groups())
    assert needs >= 244.1
    assert has == 190.7
    assert missing == pytest.approx(needs - has, abs=0.11)
    assert "no plan can exist" in str(error.value)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_plans_fit_and_proofs_that_none_exists_are_right(data: st.DataObject) -> None:
    num_ranks, on_node = data.draw(st.sampled_from([(2, 2), (3, 3), (4, 2)]))
    megabytes = data.draw(st.lists(st.integers(2, 12), min_size=1, max_size=4))
    types = ["table_wise", "row_wise"] + (["table_row_wise"] if on_node < num_ranks else [])
    options = {
        i: TableOptions(
            sharding_types=data.draw(st.lists(st.sampled_from(types), min_size=1, unique=True))
        )
        for i in range(len(megabytes))
    }
    sizes = [(mb * 4001, 64) for mb in megabytes]
    memory_gb = data.draw(st.integers(4, 20)) / 1000
    tables = table_set(sizes, num_ranks, on_node, memory_gb, device="cpu", options=options)
    planner = replace(tables, batch_size=8).planner()
    fits = _fits_somehow(planner.estimated_options(), planner.budget)
    try:
        made = replace(tables, batch_size=8).planner().make_plan()
    except InfeasiblePlanError as error:
        made, reason = None, str(error)
    if made is not None:
        assert fits
        assert (made.cost.device_bytes <= made.cost.device_bytes_usable).all()
    elif fits:
        assert "no plan can exist" not in reason


def _fits_somehow(options: list, budget: MemoryBudget) -> bool:  # type: ignore[type-arg]
    ways = []
    for table_values in options:
        ways.append([
            (option, ranks)
            for option in table_values
            for ranks in {
                "table_wise": [[rank] for rank in range(budget.num_ranks)],
                "row_wise": [list(range(budget.num_ranks))],
                "table_row_wise": [
                    list(range(start, start + budget.ranks_on_node))
                    for start in range(0, budget.num_ranks, budget.ranks_on_node)
                ],
            }[option.sharding_type]
        ])
    for way in itertools.product(*ways):
        used = np.zeros(budget.num_ranks)
        for option, ranks in way:
            np.add.at(used, ranks, option.device_bytes)
        if (used <= budget.device_bytes).all():
            return True
    return False
