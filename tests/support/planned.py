"""Plans made by hand, of any size, for what reports them."""

from typing import Any

import numpy as np

from lightning_distrec.sharding.plan_report.facts import PlanFacts
from lightning_distrec.sharding.planning.plan_cost import TIME_PARTS, PlanCost
from lightning_distrec.sharding.planning.planned_tables import PlannedTable
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.quantized_comms import QuantizedComms

CUTS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "data_parallel")


def planned(
    *,
    cut: str,
    places: NodeLayout,
    name: str = "ebc.t",
    num_rows: int = 24,
    dim: int = 8,
    ranks: list[int] | None = None,
    kernel: str = "fused",
    pooling_factors: tuple[float, ...] = (2.0, 3.0),
    **options: Any,
) -> PlannedTable:
    """Return a table on `ranks`, or on those that `cut` makes obvious. options: those of PlannedTable."""
    on_node = places.num_ranks // places.num_nodes
    obvious = {
        "row_wise": list(range(places.num_ranks)),
        "table_row_wise": list(range(on_node)),
        "data_parallel": list(range(places.num_ranks)),
    }
    on = np.array(obvious.get(cut, [0]) if ranks is None else ranks, dtype=np.int64)
    rows, columns = np.full(len(on), num_rows), np.full(len(on), dim)
    if "row" in cut:
        ends = np.minimum(np.arange(1, len(on) + 1) * -(-num_rows // len(on)), num_rows)
        rows = np.diff(ends, prepend=0)
    elif "column" in cut:
        columns = np.full(len(on), dim // len(on))
    usual: dict[str, Any] = {
        "collection": name.rpartition(".")[0],
        "element_bytes": 4,
        "pooled": True,
        "weighted": False,
        "update": "fused",
    }
    return PlannedTable(
        **usual | options,
        name=name,
        num_rows=num_rows,
        dim=dim,
        pooling_factors=pooling_factors,
        cut=cut,
        kernel=kernel,
        ranks=on,
        shard_rows=rows.astype(np.int64),
        shard_columns=columns.astype(np.int64),
    )


def planned_at_random(
    num_tables: int, places: NodeLayout, seed: int, cost: bool = False, on_gpu: bool = False, **facts: Any
) -> PlanFacts:
    """Return tables of all sizes, small ones whole and large ones cut. facts: fields of PlanFacts."""
    draw = np.random.default_rng(seed)
    num_ranks, on_node = places.num_ranks, places.num_ranks // places.num_nodes
    tables = []
    for number in range(num_tables):
        num_rows = int(10 ** draw.uniform(2.5, 8.3))
        dim = int(draw.choice([16, 32, 64, 128]))
        whole = num_rows < 10**6
        cut = str(draw.choice(["table_wise", "column_wise", "data_parallel"] if whole else CUTS[:5], p=None))
        if cut == "data_parallel" and num_rows > 20_000:
            cut = "table_wise"
        if cut == "row_wise" and num_rows < 100 * num_ranks:
            cut = "table_wise"
        node = int(draw.integers(places.num_nodes))
        here = node * on_node + np.arange(on_node)
        shards = int(min(draw.choice([2, 4]), on_node))
        of_cut = {
            "table_wise": [int(draw.integers(num_ranks))],
            "column_wise": draw.choice(num_ranks, min(shards, num_ranks), replace=False).tolist(),
            "table_row_wise": here.tolist(),
            "table_column_wise": draw.choice(here, shards, replace=False).tolist(),
        }
        pooled = bool(draw.random() < 0.8) or cut not in ("table_wise", "row_wise", "column_wise")
        tables.append(
            planned(
                name=f"model.{'bags' if pooled else 'rows'}.feature_{number}",
                cut=cut,
                places=places,
                num_rows=num_rows,
                dim=dim,
                ranks=of_cut.get(cut),
                kernel="dense"
                if cut == "data_parallel"
                else ("fused_uvm_caching" if on_gpu and number % 50 == 7 else "fused"),
                pooling_factors=(float(np.round(draw.lognormal(0.5, 1.0), 1)),),
                pooled=pooled,
                update="dense" if cut == "data_parallel" else "fused",
                update_bytes_per_row=4.0,
            )
        )
    usual = {
        "tables": tables,
        "places": places,
        "batch_size": 512,
        "comms": QuantizedComms(),
        "memory_bytes": 80 * 2**30,
        "usable_bytes": int(80 * 2**30 * 0.85),
        "on_gpu": on_gpu,
    }
    made = PlanFacts(**usual | facts)
    return PlanFacts(**usual | facts | {"cost": cost_of(made, draw)}) if cost else made


def cost_of(facts: PlanFacts, draw: np.random.Generator) -> PlanCost:
    """Return a cost that follows what ranks hold and send, with some noise."""
    num_ranks = facts.places.num_ranks
    per_byte = np.array([0.2, 1.0, 0.35, 1.0, 0.02, 0.3]) / 2e6
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
