"""The printed plan has time and bytes where they are known, and stays readable on one rank and on a
thousand."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.types import ParameterSharding

from lightning_distrec.sharding.planning.report_text import print_plan, some_ranks_in_words
from lightning_distrec.sharding.planning.sharding_plan import NOT_ESTIMATED, PlanCost, ShardingPlan
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table, find_tables


def tables_of(number: int, rows: int = 64, dim: int = 8) -> list[Table]:
    """Return tables that take no memory, of which each has one row more than the one before."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=dim, num_embeddings=rows + i, feature_names=[f"f{i}"]
        )
        for i in range(number)
    ]
    root = nn.Module()
    root.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return find_tables(root).tables


def sharding(table: Table, kind: str, ranks: list[int]) -> ParameterSharding:
    """Return a place by hand: column shards on `ranks`, row blocks where `kind` has "row" in it, or
    all on all."""
    if kind == "data_parallel":
        return ParameterSharding(kind, "dense", ranks, None)
    rows, dim = table.config.num_embeddings, table.config.embedding_dim
    block, width = (-(-rows // len(ranks)), dim) if "row" in kind else (rows, dim // len(ranks))
    shards = []
    for i, rank in enumerate(ranks):
        first_row, first_column = (i * block, 0) if "row" in kind else (0, i * width)
        sizes = [max(min(block, rows - first_row), 0), width]
        shards.append(ShardMetadata([first_row, first_column], sizes, f"rank:{rank}/cpu"))
    return ParameterSharding(kind, "fused", ranks, EnumerableShardingSpec(shards))


def plan_of(
    tables: list[Table], shardings: ShardingByTable, layout: NodeLayout, **extra: Any
) -> ShardingPlan:
    """Return a plan whose updates keep 4 bytes for every element, and 2 for every row."""
    plan = ShardingPlan.from_torchrec(tables, shardings, layout, "cpu")
    retained = {
        "update_reason": "why",
        "update_bytes_per_element": 4.0,
        "update_bytes_per_row": 2.0,
    }
    tables_values = {name: replace(table, **retained) for name, table in plan.tables.items()}
    return replace(plan, tables=tables_values, memory_bytes=10**9, usable_bytes=10**9, **extra)


def printed(
    tables: list[Table],
    shardings: ShardingByTable,
    layout: NodeLayout,
    cost: PlanCost = NOT_ESTIMATED,
    batch_size: int = 1024,
) -> list[str]:
    """Return the lines that are printed."""
    console = Console(file=io.StringIO(), width=150)
    print_plan(
        plan_of(tables, shardings, layout, cost=cost, batch_size=batch_size), console=console
    )
    return [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def cost_of(milliseconds: list[float]) -> PlanCost:
    """Return a cost that says times only."""
    none = np.zeros(len(milliseconds), dtype=np.int64)
    return PlanCost(
        milliseconds=np.array(milliseconds)[:, None].repeat(7, 1) / 7,
        device_bytes=none,
        host_bytes=none,
        device_bytes_usable=none,
        host_bytes_usable=none,
    )


def test_ranks_hold_rows_state_and_gradients_of_their_shards() -> None:
    tables = tables_of(4)
    types = {
        "t0": ("table_wise", [2]),
        "t1": ("row_wise", [0, 1, 2, 3]),
        "t2": ("column_wise", [1, 1]),
        "t3": ("", []),
    }
    types["t3"] = ("data_parallel", [0, 1, 2, 3])
    shardings = {table.full_name: sharding(table, *types[table.name]) for table in tables}
    plan = plan_of(tables, shardings, NodeLayout.equal(4, 4))
    # An element has 4 bytes and 4 more of its update, a row 2: rows of 8 elements take 66.
    t1 = [17 * 66, 17 * 66, 17 * 66, 14 * 66]
    assert plan.table_bytes().tolist() == [
        t1[0] + 67 * 66,
        t1[1] + 66 * 68 + 67 * 66,
        t1[2] + 64 * 66 + 67 * 66,
        t1[3] + 67 * 66,
    ]
    assert [table.largest_shard_bytes for table in plan.tables.values()] == [
        64 * 32,
        17 * 32,
        66 * 16,
        67 * 32,
    ]
    assert [table.num_bytes for table in plan.tables.values()] == [(64 + i) * 32 for i in range(4)]


def test_time_and_bytes_are_printed_where_they_are_known() -> None:
    tables, layout = tables_of(1), NodeLayout.equal(4, 2)
    plan = {"ebc.t0": sharding(tables[0], "table_wise", [0])}
    text = " ".join(printed(tables, plan, layout, cost_of([4.0, 1.0, 1.0, 2.0])))
    assert (
        "Estimated time for tables, per step: 4 ms on the slowest rank (0), 2 ms on average" in text
    )
    # Rank 0 sends bags of 32 KiB to each; the others send it ids and lengths of 4 KiB each, and
    # gradients of 32 KiB. All send each other three numbers, 24 bytes.
    assert (
        "Estimated bytes sent for tables, per rank and step: 54.1 KiB, 67% of it to other nodes; "
        "most by rank 0: "
        "96.1 KiB"
    ) in text
    assert not any("Estimated time" in line for line in printed(tables, plan, layout))


def test_ranks_that_are_equally_slow_are_not_distinguished() -> None:
    tables, layout = tables_of(1), NodeLayout.equal(2, 2)
    plan = {"ebc.t0": sharding(tables[0], "table_wise", [0])}
    text = " ".join(printed(tables, plan, layout, cost_of([0.5, 0.5])))
    assert "Estimated time for tables, per step: 0.5 ms on every rank" in text


def test_one_rank_has_a_time_and_sends_nothing() -> None:
    tables, layout = tables_of(1), NodeLayout.equal(1, 1)
    plan = {"ebc.t0": sharding(tables[0], "table_wise", [0])}
    text = " ".join(printed(tables, plan, layout, cost_of([0.25]), batch_size=8))
    assert "Estimated time for tables, per step: 0.25 ms" in text
    assert "Estimated bytes" not in text


def test_estimates_say_which_ids_they_assume() -> None:
    tables, shardings = rows_in_two_tables()
    plan = replace(plan_of(tables, shardings, NodeLayout((0, 0))), batch_size=512)
    lists = replace(plan.tables["rows.clicks"], pooling_factors=(73.0,))
    console = Console(file=io.StringIO(), width=150)
    print_plan(plan, console=console)
    print_plan(replace(plan, tables=plan.tables | {"rows.clicks": lists}), console=console)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert (
        "Estimates take each example to have 1 ids per feature; planning.estimate_pooling counts "
        "them" in shown
    )
    assert "Estimates take each example to have 1 to 73 ids per feature" in shown


def test_a_thousand_ranks_and_many_tables_fit_on_a_screen() -> None:
    layout = NodeLayout.equal(1024, 8)
    tables = tables_of(100, rows=4096, dim=256)
    ranks = {
        "table_wise": [5],
        "row_wise": list(range(1024)),
        "column_wise": list(range(7, 1024, 20))[:32],
    }
    types = list(ranks)
    plan = {
        t.full_name: sharding(t, types[i % 3], ranks[types[i % 3]]) for i, t in enumerate(tables)
    }
    lines = printed(tables, plan, layout, cost_of([1.0] * 1024))
    assert len(lines) < 75
    assert max(map(len, lines)) <= 150
    assert "40 smaller tables not shown; the callback PlanLogger writes them all" in lines
    assert sum("ebc.t" in line for line in lines) == 60
    assert any("ebc.t99" in line for line in lines)
    assert not any("ebc.t39 " in line for line in lines)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        (list(range(1024)), "0-1023"),
        ([0, 5, 9], "0, 5, 9"),
        (list(range(0, 40, 2)), "20 of 0-38"),
    ],
)
def test_ranks_are_named_or_counted(ranks: list[int], text: str) -> None:
    assert some_ranks_in_words(ranks) == text


def test_tables_whose_repeated_ids_are_sent_once_are_named() -> None:
    tables, shardings = rows_in_two_tables()
    plan = plan_of(tables, shardings, NodeLayout((0, 0)))
    clicks = replace(
        plan.tables["rows.clicks"], pooled=False, distinct_share=0.39, deduplicated=True
    )
    console = Console(file=io.StringIO(), width=150)
    print_plan(replace(plan, tables=plan.tables | {"rows.clicks": clicks}), console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Ids that a batch repeats are sent once: rows.clicks (39% are different)" in shown
    assert "not sharded" not in shown


def rows_in_two_tables() -> tuple[list[Table], ShardingByTable]:
    """Return the tables of an EmbeddingCollection, by rows."""
    names = ("clicks", "buys")
    configs = [
        EmbeddingConfig(name=n, embedding_dim=8, num_embeddings=64, feature_names=[n])
        for n in names
    ]
    root = nn.Module()
    root.rows = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    tables = find_tables(root).tables
    return tables, {table.full_name: sharding(table, "row_wise", [0, 1]) for table in tables}
