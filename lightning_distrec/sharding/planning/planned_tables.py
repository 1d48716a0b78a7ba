"""What a plan says of each table, as numbers and arrays that estimates, reports and pictures read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.types import EnumerableShardingSpec

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.tables import Table


@dataclass(frozen=True)
class UpdateCost:
    """What reports need to know of a table's update."""

    kind: str
    why: str
    bytes_per_element: float
    bytes_per_row: float


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """One table with its place. Shapes: S is the number of its shards."""

    name: str
    """Its full name."""
    collection: str
    """Tables of one collection, cut alike, travel together."""
    num_rows: int
    dim: int
    element_bytes: int
    """Bytes of one number of a row."""
    pooled: bool
    """Whether it returns one vector per bag or one per id."""
    weighted: bool
    """Whether ids travel with weights."""
    pooling_factors: tuple[float, ...]
    """Ids per example, of each of its features."""
    cut: str
    kernel: str
    update: str
    """The kind of its update."""
    why: str = ""
    """... and why it is that."""
    update_bytes_per_element: float = 0.0
    """What its update keeps beside every number: optimizer state, gradients."""
    update_bytes_per_row: float = 0.0
    ranks: NDArray[np.int64]
    """(S,): the rank of each shard."""
    shard_rows: NDArray[np.int64]
    """(S,)"""
    shard_columns: NDArray[np.int64]
    """(S,)"""

    @property
    def num_bytes(self) -> int:
        """Its rows, once."""
        return self.num_rows * self.dim * self.element_bytes

    @property
    def largest_shard_bytes(self) -> int:
        """The rows of its largest shard."""
        return int((self.shard_rows * self.shard_columns).max(initial=0)) * self.element_bytes

    @property
    def on_host(self) -> bool:
        """Whether a GPU reads it from its host's memory."""
        return self.kernel.startswith("fused_uvm")

    @property
    def learns(self) -> bool:
        """Whether gradients of its rows travel."""
        return self.update != "frozen"


def planned_tables(
    tables: Iterable[Table],
    plan: ShardingByTable,
    updates: Mapping[str, UpdateCost],
    num_ranks: int,
    pooling_factors: Mapping[str, Sequence[float]] | None = None,
) -> list[PlannedTable]:
    """Return the tables with their places.

    pooling_factors: full name -> ids per example for each of the table's features; 1 for tables that are not named.
    Raises PlanError: the plan leaves a table out, or there are not as many pooling factors as features.
    """
    return [
        _planned(table, plan, updates[table.full_name], num_ranks, (pooling_factors or {}).get(table.full_name))
        for table in tables
    ]


def _planned(
    table: Table, plan: ShardingByTable, update: UpdateCost, num_ranks: int, factors: Sequence[float] | None
) -> PlannedTable:
    name, config = table.full_name, table.config
    if name not in plan:
        raise PlanError(f"the plan has no table '{name}'. It has {', '.join(sorted(plan)) or 'none'}.")
    num_features = len(config.feature_names)
    factors = tuple(factors) if factors is not None else (1.0,) * num_features
    if len(factors) != num_features:
        raise PlanError(
            f"table '{name}' has {num_features} features ({', '.join(config.feature_names)}) and {len(factors)} "
            "pooling factors. Give one for each feature, in their order."
        )
    sharding = plan[name]
    spec = sharding.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        sizes = np.array([shard.shard_sizes for shard in spec.shards], dtype=np.int64).reshape(-1, 2)
        ranks = np.array([shard.placement.rank() for shard in spec.shards if shard.placement], dtype=np.int64)
    else:
        sizes = np.tile(np.array([[config.num_embeddings, config.embedding_dim]], dtype=np.int64), (num_ranks, 1))
        ranks = np.arange(num_ranks, dtype=np.int64)
    return PlannedTable(
        name=name,
        collection=table.collection,
        num_rows=config.num_embeddings,
        dim=config.embedding_dim,
        element_bytes=torch.finfo(table.parameter.dtype).bits // 8,
        pooled=table.pooled,
        weighted=bool(getattr(table.module, "is_weighted", lambda: False)()),
        pooling_factors=factors,
        cut=sharding.sharding_type,
        kernel=sharding.compute_kernel,
        update=update.kind,
        why=update.why,
        update_bytes_per_element=update.bytes_per_element,
        update_bytes_per_row=update.bytes_per_row,
        ranks=ranks,
        shard_rows=sizes[:, 0],
        shard_columns=sizes[:, 1],
    )
