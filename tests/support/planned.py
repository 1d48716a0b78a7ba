"""Plans made by hand, of any size, for what reports them."""

from dataclasses import replace
from typing import Any

import numpy as np

from lightning_distrec.sharding.planning.planned_table import PlannedShard, PlannedTable
from lightning_distrec.sharding.planning.sharding_plan import TIME_PARTS, PlanCost, ShardingPlan
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import NodeLayout

TYPES = (
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "data_parallel",
)


def planned(
    *,
    sharding_type: str,
    layout: NodeLayout,
    name: str = "ebc.t",
    num_rows: int = 24,
    dim: int = 8,
    ranks: list[int] | None = None,
    kernel: str = "fused",
    pooling_factors: tuple[float, ...] = (2.0, 3.0),
    **options: Any,
) -> PlannedTable:
    """Return a table on `ranks`, or on those that `sharding_type` makes obvious. options: those of
    PlannedTable."""
    on_node = layout.num_ranks // layout.num_nodes
    obvious = {
        "row_wise": list(range(layout.num_ranks)),
        "table_row_wise": list(range(on_node)),
        "data_parallel": list(range(layout.num_ranks)),
    }
    device = obvious.get(sharding_type, [0]) if ranks is None else ranks
    block, width = num_rows, dim
    if "row" in sharding_type:
        block = -(-num_rows // len(device))
    elif "column" in sharding_type:
        width = dim // len(device)
    shards = []
    for i, rank in enumerate(device):
        row, column = (
            (i * block if "row" in sharding_type else 0),
            (i * width if "column" in sharding_type else 0),
        )
        shards.append(
            PlannedShard(rank, (row, column), (max(0, min(block, num_rows - row)), width))
        )
    usual: dict[str, Any] = {"collection": name.rpartition(".")[0]}
    return PlannedTable(
        **usual | options,
        name=name,
        num_rows=num_rows,
        dim=dim,
        pooling_factors=pooling_factors,
        sharding_type=sharding_type,
        compute_kernel=kernel,
        shards=tuple(shards),
    )


def planned_at_random(
    num_tables: int,
    layout: NodeLayout,
    seed: int,
    cost: bool = False,
    on_gpu: bool = False,
    **facts: Any,
) -> ShardingPlan:
    """Return tables of all sizes, small ones whole and large ones cut. facts: fields of
    ShardingPlan."""
    draw = np.random.default_rng(seed)
    num_ranks, on_node = layout.num_ranks, layout.num_ranks // layout.num_nodes
    tables = []
    for number in range(num_tables):
        num_rows = int(10 ** draw.uniform(2.5, 8.3))
        dim = int(draw.choice([16, 32, 64, 128]))
        whole = num_rows < 10**6
        sharding_type = str(
            draw.choice(
                ["table_wise", "column_wise", "data_parallel"] if whole else TYPES[:5], p=None
            )
        )
        if sharding_type == "data_parallel" and num_rows > 20_000:
            sharding_type = "table_wise"
        if sharding_type == "row_wise" and num_rows < 100 * num_ranks:
            sharding_type = "table_wise"
        node = int(draw.integers(layout.num_nodes))
        local = node * on_node + np.arange(on_node)
        shards = int(min(draw.choice([2, 4]), on_node))
        type_values = {
            "table_wise": [int(draw.integers(num_ranks))],
            "column_wise": draw.choice(num_ranks, min(shards, num_ranks), replace=False).tolist(),
            "table_row_wise": local.tolist(),
            "table_column_wise": draw.choice(local, shards, replace=False).tolist(),
        }
        pooled = bool(draw.random() < 0.8) or sharding_type not in (
            "table_wise",
            "row_wise",
            "column_wise",
        )
        tables.append(
            planned(
                name=f"model.{'bags' if pooled else 'rows'}.feature_{number}",
                sharding_type=sharding_type,
                layout=layout,
                num_rows=num_rows,
                dim=dim,
                ranks=type_values.get(sharding_type),
                kernel="dense"
                if sharding_type == "data_parallel"
                else ("fused_uvm_caching" if on_gpu and number % 50 == 7 else "fused"),
                pooling_factors=(float(np.round(draw.lognormal(0.5, 1.0), 1)),),
                pooled=pooled,
                update="dense" if sharding_type == "data_parallel" else "fused",
                update_bytes_per_row=4.0,
            )
        )
    usual = {
        "tables": {table.name: table for table in tables},
        "layout": layout,
        "batch_size": 512,
        "comms": QuantizedComms(),
        "memory_bytes": 80 * 2**30,
        "usable_bytes": int(80 * 2**30 * 0.85),
        "device": "cuda" if on_gpu else "cpu",
    }
    made = ShardingPlan(**usual | facts)
    return replace(made, cost=cost_of(made, draw)) if cost else made


def cost_of(facts: ShardingPlan, draw: np.random.Generator) -> PlanCost:
    """Return a cost that follows what ranks hold and send, with some noise."""
    num_ranks = facts.layout.num_ranks
    per_byte = np.array([0.2, 1.0, 0.35, 1.0, 0.02, 0.3, 0.5]) / 2e6
    sent = facts.traffic.sent() + 1e5
    noise = draw.lognormal(0, 0.25, (num_ranks, len(TIME_PARTS)))
    host = facts.host_memory
    return PlanCost(
        milliseconds=sent[:, None] * per_byte * noise,
        device_bytes=(facts.memory.tables * 1.1).astype(np.int64),
        host_bytes=np.zeros(num_ranks, dtype=np.int64) if host is None else host.tables,
        device_bytes_usable=np.full(num_ranks, facts.usable_bytes),
        host_bytes_usable=np.full(num_ranks, 200 * 2**30 if facts.on_gpu else 0),
    )
