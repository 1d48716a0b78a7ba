"""What updates cost: kinds and optimizers in the order in which they were measured, and plans that
follow them."""

from dataclasses import replace

import numpy as np

from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.costs import update_milliseconds
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
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
    return tables.planner().make_plan()


def milliseconds(
    kind: str, per_element: float, rows: int, ids: float = 5000, on_gpu: bool = False
) -> float:
    constraints = TableConstraints(
        (), False, TableOptions(), update=kind, bytes_per_element=per_element
    )
    return float(update_milliseconds([(rows, 64)], constraints, ids, on_gpu, 13e6)[0])


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
    moved = as_before.planner().estimate(even)
    assert moved.cost.critical_path > uneven.cost.critical_path
