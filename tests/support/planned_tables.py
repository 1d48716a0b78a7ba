"""Sets of tables to plan: drawn from a seed, on the meta device, so that they may be of any
size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from lightning_distrec._compat.torchrec_modules import silence_torchrec
from lightning_distrec.sharding.planning.bandwidths import AssumedBandwidths, bandwidth_request
from lightning_distrec.sharding.planning.constraints import (
    TableConstraints,
    allowed_types,
    torchrec_constraint,
)
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.planning.topology import RankMemory, make_topology
from lightning_distrec.sharding.sharders import sharders
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table, find_tables

Kind = Literal["uniform", "zipf", "giant", "tiny"]
KINDS: tuple[Kind, ...] = ("uniform", "zipf", "giant", "tiny")


@dataclass(frozen=True)
class TableSet:
    """Tables, and where they are to go."""

    tables: list[Table]
    constraints: Mapping[str, TableConstraints]
    topology: Topology
    batch_size: int = 512

    def planner(self) -> Planner:
        """Return our planner of these tables."""
        return Planner(self.tables, self.constraints, self.topology, self.batch_size)


def draw_tables(
    kind: Kind,
    num_tables: int,
    num_ranks: int,
    ranks_on_node: int,
    memory_gb: float,
    seed: int = 0,
    device: Literal["cuda", "cpu"] = "cuda",
) -> TableSet:
    """Return tables of random sizes, dims and pooling factors.

    uniform: 10 thousand to 5 million rows; zipf: 50 million rows over the table's number; giant:
    one of 200 million beside small ones; tiny: some thousands.
    """
    draw = np.random.default_rng(seed)
    dims = draw.choice([16, 32, 64, 128, 256], size=num_tables)
    if kind == "zipf":
        rows = (50e6 / np.arange(1, num_tables + 1) * draw.uniform(0.5, 1.5, num_tables)).astype(
            int
        ) + 2048
    else:
        least, most = {
            "uniform": (10_000, 5_000_000),
            "giant": (2048, 1_000_000),
            "tiny": (2048, 5_000),
        }[kind]
        rows = draw.integers(least, most, size=num_tables)
    if kind == "giant":
        rows[0] = 200_000_000
    pooling = np.exp(draw.normal(1.5, 1.2, size=num_tables)).clip(1, 200)
    sizes = [(int(r), int(d)) for r, d in zip(rows, dims, strict=True)]
    return table_set(sizes, num_ranks, ranks_on_node, memory_gb, pooling.tolist(), device)


def table_set(
    sizes: list[tuple[int, int]],
    num_ranks: int,
    ranks_on_node: int,
    memory_gb: float,
    pooling: list[float] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    options: Mapping[int, TableOptions] | None = None,
) -> TableSet:
    """Return tables of these (rows, dim). memory_gb: what tables may take of a rank, in 10^9 bytes.

    options: by the table's number.
    """
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"]
        )
        for i, (rows, dim) in enumerate(sizes)
    ]
    module = nn.Module()
    module.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    tables = find_tables(module).tables
    layout = NodeLayout.from_node_sizes(*[ranks_on_node] * (num_ranks // ranks_on_node))
    constraints = {}
    for i, table in enumerate(tables):
        selection = (options or {}).get(i) or TableOptions(
            pooling_factor=(pooling or [1.0] * len(sizes))[i]
        )
        constraints[table.full_name] = TableConstraints(
            allowed_types(table, selection, layout, ""), False, selection
        )
    return TableSet(tables, constraints, topology_of(layout, device, int(memory_gb * 1e9)))


def default_bandwidths() -> AssumedBandwidths:
    """Return torchrec's."""
    return bandwidth_request(None, {}).with_measured({}, "cuda")


def topology_of(
    layout: NodeLayout,
    device: Literal["cuda", "cpu"],
    memory_bytes: int,
    bandwidths: AssumedBandwidths | None = None,
) -> Topology:
    """Return ranks with so many bytes each for tables. bandwidths: torchrec's, unless given."""
    ranks = layout.num_ranks
    memory = RankMemory(device_bytes=(memory_bytes,) * ranks, host_bytes=(128 * 10**9,) * ranks)
    assumed = bandwidths or default_bandwidths()
    return make_topology(torch.device(device), layout, memory, assumed)


def default_plan(inputs: TableSet) -> ShardingPlan:
    """Return the plan of torchrec's EmbeddingShardingPlanner, which knows of the tables what ours
    knows."""
    constraints = {}
    for table in inputs.tables:
        constraint = inputs.constraints[table.full_name]
        constraints[table.name] = torchrec_constraint(table, constraint)
    planner = EmbeddingShardingPlanner(
        topology=inputs.topology,
        batch_size=inputs.batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    tree = nn.Module()
    tree.ebc = inputs.tables[0].module
    with silence_torchrec():
        plan = planner.plan(tree, sharders()).plan["ebc"]
    shardings = {table.full_name: plan[table.name] for table in inputs.tables}
    layout = NodeLayout.equal(inputs.topology.world_size, inputs.topology.local_world_size)
    device = inputs.topology.compute_device
    return ShardingPlan.from_torchrec(inputs.tables, shardings, layout, device)


def default_critical_path(inputs: TableSet) -> float:
    """Return the milliseconds of the slowest rank in the plan of torchrec's
    EmbeddingShardingPlanner, ids included."""
    return inputs.planner().estimate(default_plan(inputs)).cost.critical_path
