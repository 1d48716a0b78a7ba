"""What updates cost: kinds and optimizers in the order in which they were measured, and plans that
follow them."""

import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.costs import touched_rows, update_milliseconds
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.report_text import print_plan
from lightning_distrec.sharding.planning.sharding_plan import TIME_PARTS, ShardingPlan
from lightning_distrec.sharding.planning.table_options import TableOptions
from tests.support.planned_tables import TableSet, table_set

ADAM, ADAGRAD = 12.0, 4.0
"""Bytes that a dense Adam and a fused Adagrad keep for each element."""


def with_update(
    tables: TableSet, kind: str, optimizer: str, per_element: float, table: str = ""
) -> TableSet:
    changed = {
        name: replace(constraints, update=kind, optimizer=optimizer, bytes_per_element=per_element)
        if table in name
        else constraints
        for name, constraints in tables.constraints.items()
    }
    return replace(tables, constraints=changed)


def planned(tables: TableSet) -> ShardingPlan:
    return Planner(
        tables.tables, tables.constraints, tables.topology, tables.batch_size
    ).make_plan()


def milliseconds(
    kind: str, per_element: float, rows: int, ids: float = 5000, on_gpu: bool = False
) -> float:
    constraints = TableConstraints(
        (), False, TableOptions(), update=kind, bytes_per_element=per_element
    )
    return float(update_milliseconds([(rows, 64)], constraints, ids, on_gpu, 13e6)[0])


def test_touched_rows_are_those_of_evenly_spread_ids() -> None:
    drawn = len(np.unique(np.random.default_rng(0).integers(0, 1000, 1500)))
    assert abs(touched_rows(1000, 1500) - drawn) < 25
    assert touched_rows(10**9, 100) > 99.99


def test_only_dense_updates_grow_with_the_rows_that_no_id_touched() -> None:
    for on_gpu in (False, True):
        small, large = 10**6, 10**7
        assert milliseconds("dense", ADAM, large, on_gpu=on_gpu) > 8 * milliseconds(
            "dense", ADAM, small, on_gpu=on_gpu
        )
        for kind in ("fused", "sparse", "fused_lazy"):
            assert milliseconds(kind, ADAGRAD, large, on_gpu=on_gpu) < 1.01 * milliseconds(
                kind, ADAGRAD, small, on_gpu=on_gpu
            )
        assert milliseconds("dense", ADAM, large, on_gpu=on_gpu) > 10 * milliseconds(
            "fused", ADAGRAD, large, on_gpu=on_gpu
        )
        assert milliseconds("frozen", ADAGRAD, large, on_gpu=on_gpu) == 0


def test_the_rank_with_the_dense_table_gets_the_fewest_others() -> None:
    only_whole = {
        i: TableOptions(sharding_types=["table_wise"], pooling_factor=5.0) for i in range(7)
    }
    tables = table_set([(200_000, 64)] * 7, 2, 2, 8.0, options=only_whole, device="cpu")
    even, uneven = planned(tables), planned(with_update(tables, "dense", "Adam", ADAM, table="t0"))
    counts = [
        np.bincount([int(t.ranks[0]) for t in plan.tables.values()], minlength=2)
        for plan in (even, uneven)
    ]
    assert sorted(counts[0].tolist()) == [3, 4]
    assert sorted(counts[1].tolist()) == [1, 6]
    assert uneven.tables["ebc.t0"].update_on(uneven.cost.slowest) > 0.5 * uneven.cost.critical_path
    as_before = with_update(tables, "dense", "Adam", ADAM, table="t0")
    moved = Planner(
        tables.tables, as_before.constraints, tables.topology, tables.batch_size
    ).estimate(even)
    assert moved.cost.critical_path > uneven.cost.critical_path


def test_the_start_table_says_when_updates_outweigh_lookups_and_what_would_change_it() -> None:
    first = {0: TableOptions(sharding_types=["table_wise"], pooling_factor=1.0)}
    tables = table_set([(10_000_000, 64)], 2, 2, 40.0, options=first)
    text = printed(planned(with_update(tables, "dense", "Adam", ADAM)))
    assert "Updates outweigh lookups: dense Adam moves all rows of 'ebc.t0' in each step, " in text
    assert (
        "table_optimizer Adagrad or, not with the same numbers, embedding_update fused_lazy would "
        "move those" in text
    )
    on_cpu = table_set([(10_000_000, 64)], 2, 2, 40.0, options=first, device="cpu")
    assert "fused_lazy" not in printed(planned(with_update(on_cpu, "dense", "Adam", ADAM)))
    assert "outweigh" not in printed(planned(with_update(tables, "fused", "SGD", 0.0)))


def test_updates_of_microseconds_are_not_mentioned() -> None:
    one_id = {0: TableOptions(sharding_types=["table_wise"], pooling_factor=1.0)}
    plan = planned(
        with_update(table_set([(10_000, 64)], 2, 2, 40.0, options=one_id), "dense", "Adam", ADAM)
    )
    slowest = plan.cost.slowest
    assert plan.cost.part("update")[slowest] > 0.5 * plan.cost.milliseconds_by_rank[slowest]
    assert "outweigh" not in printed(plan)


def printed(plan: ShardingPlan) -> str:
    console = Console(file=io.StringIO(), width=150)
    print_plan(plan, console=console)
    assert plan.cost.milliseconds.shape == (2, len(TIME_PARTS))
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
