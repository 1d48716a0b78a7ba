"""The printed plan has time and bytes where they are known, and stays readable on a thousand
ranks."""

import io
from typing import Any

import numpy as np
from rich.console import Console

from lightning_distrec.sharding.planning.planned_table import PlannedTable
from lightning_distrec.sharding.planning.report_text import (
    memory_in_words,
    print_plan,
)
from lightning_distrec.sharding.planning.sharding_plan import NOT_ESTIMATED, PlanCost, ShardingPlan
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.support.planned import planned


def table(
    layout: NodeLayout, number: int, kind: str, rows: int = 64, **options: Any
) -> PlannedTable:
    """Return a table whose update keeps 4 bytes for every element, and 2 for every row."""
    kept = {"update_bytes_per_element": 4.0, "update_bytes_per_row": 2.0, "update_reason": "why"}
    options = {"pooling_factors": (1.0,), "num_rows": rows + number} | kept | options
    return planned(sharding_type=kind, layout=layout, name=f"ebc.t{number}", **options)


def plan_of(
    tables: list[PlannedTable], layout: NodeLayout, milliseconds: tuple[float, ...] = ()
) -> ShardingPlan:
    cost = NOT_ESTIMATED
    if milliseconds:
        none = np.zeros(len(milliseconds), dtype=np.int64)
        cost = PlanCost(
            milliseconds=np.array(milliseconds)[:, None].repeat(7, 1) / 7,
            device_bytes=none,
            host_bytes=none,
            device_bytes_usable=none,
            host_bytes_usable=none,
        )
    return ShardingPlan(
        layout=layout,
        device="cpu",
        tables={planned_table.name: planned_table for planned_table in tables},
        batch_size=1024,
        memory_bytes=10**9,
        usable_bytes=10**9,
        cost=cost,
    )


def printed(plan: ShardingPlan) -> list[str]:
    """Return the lines that are printed."""
    console = Console(file=io.StringIO(), width=150)
    print_plan(plan, console=console)
    return [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_ranks_hold_rows_state_and_gradients_of_their_shards() -> None:
    layout = NodeLayout.equal(4, 4)
    tables = [
        table(layout, 0, "table_wise", ranks=[2]),
        table(layout, 1, "row_wise"),
        table(layout, 2, "column_wise", ranks=[1, 1]),
        table(layout, 3, "data_parallel", kernel="dense"),
    ]
    plan = plan_of(tables, layout)
    # An element has 4 bytes and 4 more of its update, a row 2: rows of 8 elements take 66.
    t1 = [17 * 66, 17 * 66, 17 * 66, 14 * 66]
    assert plan.table_bytes().tolist() == [
        t1[0] + 67 * 66,
        t1[1] + 66 * 68 + 67 * 66,
        t1[2] + 64 * 66 + 67 * 66,
        t1[3] + 67 * 66,
    ]
    largest = [64 * 32, 17 * 32, 66 * 16, 67 * 32]
    assert [table.largest_shard_bytes for table in plan.tables.values()] == largest
    assert [table.num_bytes for table in plan.tables.values()] == [(64 + i) * 32 for i in range(4)]
    assert memory_in_words(plan.memory, "host").startswith("Rank 1, the fullest, fills under 1%")


def test_time_and_bytes_are_printed_where_they_are_known() -> None:
    layout = NodeLayout.equal(4, 2)
    tables = [table(layout, 0, "table_wise", ranks=[0])]
    text = " ".join(printed(plan_of(tables, layout, (4.0, 1.0, 1.0, 2.0))))
    assert (
        "Estimated time for tables, per step: 4 ms on the slowest rank (0), 2 ms on average" in text
    )
    # Rank 0 sends bags of 32 KiB to each; the others send it ids and lengths of 4 KiB each, and
    # gradients of 32 KiB. All send each other three numbers, 24 bytes.
    assert (
        "Estimated bytes sent for tables, per rank and step: 54.1 KiB, 67% of it to other nodes; "
        "most by rank 0: 96.1 KiB"
    ) in text
    assert not any("Estimated time" in line for line in printed(plan_of(tables, layout)))


def test_a_thousand_ranks_and_many_tables_fit_on_a_screen() -> None:
    layout = NodeLayout.equal(1024, 8)
    ranks = {"table_wise": [5], "row_wise": None, "column_wise": list(range(7, 1024, 20))[:32]}
    types = list(ranks) * 34
    options = {"rows": 4096, "dim": 256}
    tables = [table(layout, i, types[i], ranks=ranks[types[i]], **options) for i in range(100)]
    lines = printed(plan_of(tables, layout, (1.0,) * 1024))
    assert len(lines) < 75
    assert max(map(len, lines)) <= 150
    assert "40 smaller tables not shown; the callback PlanLogger writes them all" in lines
    assert sum("ebc.t" in line for line in lines) == 60
    assert any("ebc.t99" in line for line in lines)
    assert not any("ebc.t39 " in line for line in lines)
