"""The model whose plans are timed, tables of unlike dims, rows and bags; and the timed plans: those
of the planners, one per sharding type, and a sample."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec.sharding.planning.bandwidths import AssumedBandwidths
from lightning_distrec.sharding.planning.planned_table import PlannedShard, PlannedTable, in_order
from lightning_distrec.sharding.planning.sharding_options import (
    EstimatedOption,
    without_duplicates,
)
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.sharders import EVERY_RANK_TYPES
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table
from tests.benchmarks.performance_model import DrawnBatches, as_dict
from tests.support.planned_tables import TableSet, default_bandwidths, table_set, topology_of

SIZES = (
    (100_000, 64, 20),
    (200_000, 32, 40),
    (50_000, 128, 1),
    (20_000, 16, 60),
    (5_000, 64, 5),
)
"""Rows, dim and ids per example of each table."""
NARROWEST = 32
"""Columns of a column-wise shard."""
BATCH_SIZE = 512
LEARNING_RATE = 0.05
MEMORY_BYTES = 4 * 2**30
"""Of each rank: more than enough, so that time alone tells plans apart."""
TABLE_OPTIONS = {
    number: TableOptions(pooling_factor=float(num_ids), min_partition=NARROWEST)
    for number, (_, _, num_ids) in enumerate(SIZES)
}


class LitTables(pl.LightningModule):
    """Bags of all tables side by side, and one layer on them."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc: EmbeddingBagCollection | None = None
        self.top = nn.Linear(sum(dim for _, dim, _ in SIZES), 1)

    def configure_model(self) -> None:
        if self.ebc is not None:
            return
        configs = []
        for number, (num_rows, dim, _) in enumerate(SIZES):
            names: dict[str, Any] = {"name": f"t{number}", "feature_names": [f"f{number}"]}
            configs.append(EmbeddingBagConfig(num_embeddings=num_rows, embedding_dim=dim, **names))
        self.ebc = EmbeddingBagCollection(tables=configs)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert self.ebc is not None
        logits = self.top(self.ebc(batch["ids"]).values()).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def batches(number: int, rank: int) -> DataLoader:
    """Return so many batches of one rank. Bags hold none to twice the ids that planners know
    of."""
    draw = torch.Generator().manual_seed(1 + rank)
    drawn = []
    for _ in range(number):
        all_values, all_lengths = [], []
        for num_rows, _, num_ids in SIZES:
            lengths = torch.randint(0, 2 * num_ids + 1, (BATCH_SIZE,), generator=draw)
            values = torch.randint(0, num_rows, (int(lengths.sum()),), generator=draw)
            all_values.append(values)
            all_lengths.append(lengths)
        label = torch.randint(0, 2, (BATCH_SIZE,), generator=draw).float()
        drawn.append((label, torch.cat(all_values), torch.cat(all_lengths), label))
    names = [f"f{number}" for number in range(len(SIZES))]
    return DataLoader(DrawnBatches(names, drawn, as_dict), batch_size=None)


def tables_on(layout: NodeLayout, bandwidths: AssumedBandwidths) -> TableSet:
    """Return what planners know of the model's tables and of ranks."""
    sizes = [(num_rows, dim) for num_rows, dim, _ in SIZES]
    ranks = (layout.num_ranks, layout.ranks_on_node)
    tables = table_set(sizes, *ranks, memory_gb=0, device="cpu", options=TABLE_OPTIONS)
    topology = topology_of(layout, "cpu", MEMORY_BYTES, bandwidths)
    return replace(tables, topology=topology, batch_size=BATCH_SIZE)


def plans_of_one_type(inputs: TableSet) -> dict[str, ShardingPlan]:
    """Return the best plan, as estimated, of each sharding type that all tables can have."""
    kinds = set()
    for options in inputs.planner().estimated_options():
        kinds |= {option.sharding_type for option in options}
    plans = {}
    for kind in sorted(kinds):
        constraints = {}
        for name, constraint in inputs.constraints.items():
            constraints[name] = replace(constraint, sharding_types=(kind,))
        planner = replace(inputs, constraints=constraints).planner()
        plans[f"all {kind}"] = planner.make_plan()
    return plans


Key = tuple[tuple[str, tuple[int, ...]], ...]
"""What tells plans apart: of each table its sharding type, and the ranks of its shards, sorted."""


def key_of(plan: ShardingPlan) -> Key:
    """Return what is equal for equal plans."""
    key = []
    for table in plan.tables.values():
        ranks = tuple(sorted(shard.rank for shard in table.shards))
        key.append((table.sharding_type, ranks))
    return tuple(key)


def sampled_plans(
    layout: NodeLayout, named: Mapping[str, ShardingPlan], number: int, seed: int
) -> dict[str, ShardingPlan]:
    """Return name -> plan: `named`, and drawn ones up to `number` in all. In those each sharding
    type of a table is as likely as any, and then each place."""
    inputs, draw = tables_on(layout, default_bandwidths()), np.random.default_rng(seed)
    options_by_table = [without_duplicates(o) for o in inputs.planner().estimated_options()]
    plans = dict(named)
    keys = {key_of(plan) for plan in plans.values()}
    while len(plans) < number:
        tables = {}
        for table, options in zip(inputs.tables, options_by_table, strict=True):
            option = options[draw.integers(len(options))]
            ways = list(_ranks_of(option, layout))
            ranks = ways[draw.integers(len(ways))]
            tables[table.full_name] = _placed(table, option, ranks)
        plan = ShardingPlan(layout=layout, device="cpu", tables=tables)
        if key_of(plan) not in keys:
            keys.add(key_of(plan))
            plans[f"drawn {len(plans)}"] = plan
    return plans


def _placed(table: Table, option: EstimatedOption, ranks: tuple[int, ...]) -> PlannedTable:
    pieces = zip(ranks, option.offsets, option.sizes, strict=True)
    return PlannedTable(
        name=table.full_name,
        num_rows=table.config.num_embeddings,
        dim=table.config.embedding_dim,
        sharding_type=option.sharding_type,
        compute_kernel=option.kernel,
        shards=in_order(PlannedShard(*piece) for piece in pieces),
    )


def _ranks_of(option: EstimatedOption, layout: NodeLayout) -> Iterator[tuple[int, ...]]:
    """Yield the ranks on which an option's shards can be; places of like shards once."""
    ranks, on_node = range(layout.num_ranks), layout.ranks_on_node
    nodes = [tuple(ranks[start : start + on_node]) for start in range(0, len(ranks), on_node)]
    num_shards = len(option.size_numbers)
    if option.sharding_type in EVERY_RANK_TYPES:
        yield tuple(ranks)
    elif option.sharding_type == "table_row_wise":
        yield from nodes
    elif option.sharding_type == "table_column_wise":
        for node in nodes:
            yield from itertools.combinations_with_replacement(node, num_shards)
    else:
        yield from itertools.combinations_with_replacement(ranks, num_shards)
