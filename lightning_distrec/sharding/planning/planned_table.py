"""One table of a plan: its sharding type, its kernel and its shards, with what estimates and
reports need of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import (
    CacheParams,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardMetadata,
)

from lightning_distrec.sharding.sharders import HOST_KERNELS
from lightning_distrec.sharding.tables import Table


class PlannedShard(NamedTuple):
    """A rectangle of a table on a rank. A named tuple: a plan for a thousand ranks has a million of
    them."""

    rank: int
    offsets: tuple[int, int]
    """First row and first column."""
    sizes: tuple[int, int]
    """Rows and columns."""

    def __str__(self) -> str:
        (row, column) = self.offsets
        (rows, columns) = self.sizes
        return f"rows {row}-{row + rows - 1} of columns {column}-{column + columns - 1}"


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """Where one table is. Shapes: S is the number of its shards."""

    name: str
    """Its full name."""
    num_rows: int
    dim: int
    data_type: str = "FP32"
    """As torchrec's DataType has it: FP32, FP16."""
    sharding_type: str
    compute_kernel: str
    shards: tuple[PlannedShard, ...]
    """By their first column, then row. A data_parallel table has one shard, all of it, on each
    rank."""
    cache_load_factor: float | None = None
    """Share of the rows that fused_uvm_caching keeps on the GPU; None for torchrec's own."""

    # The rest is known in a run, and not in plan files.
    collection: str = ""
    """Tables of one collection and one sharding type are exchanged together."""
    pooled: bool = True
    """Whether it returns one vector per bag or one per id."""
    weighted: bool = False
    """Whether ids are sent with weights."""
    pooling_factors: tuple[float, ...] = (1.0,)
    """Ids per example, of each of its features."""
    distinct_share: float = 1.0
    """Different ids over ids of a rank's batch, feature by feature: counted, or that of ids spread
    evenly."""
    deduplicated: bool = False
    """Whether an id that a batch repeats is sent once, and its row is returned once."""
    update: str = "fused"
    """The kind of its update."""
    optimizer: str = ""
    """Class of the optimizer that updates it."""
    # compare=False: `==` of arrays is an array, which a dataclass's `__eq__` cannot use.
    update_milliseconds: NDArray[np.float64] | None = field(default=None, compare=False)
    """(S,): estimated time of a step that updates each shard; None where that was not estimated."""
    update_reason: str = ""
    """Why the update is of that kind."""
    update_bytes_per_element: float = 0.0
    """Optimizer state and gradients for each element."""
    update_bytes_per_row: float = 0.0

    @staticmethod
    def placed(table: Table, **place: Any) -> "PlannedTable":
        """Return where `table` is. place: the fields about sharding type, kernel and shards."""
        return PlannedTable(
            name=table.full_name,
            num_rows=table.config.num_embeddings,
            dim=table.config.embedding_dim,
            data_type=table.config.data_type.value,
            **place,
        )

    @property
    def size(self) -> str:
        """Rows, dim and type, for messages."""
        return f"{self.num_rows:,} x {self.dim:,} {self.data_type}"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a row."""
        return 2 if self.data_type == "FP16" else 4

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows, counted once."""
        return self.num_rows * self.dim * self.element_bytes

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """(S,): the rank of each shard."""
        return np.array([shard.rank for shard in self.shards], dtype=np.int64)

    @cached_property
    def shard_rows(self) -> NDArray[np.int64]:
        """(S,)."""
        return np.array([shard.sizes[0] for shard in self.shards], dtype=np.int64)

    @cached_property
    def shard_columns(self) -> NDArray[np.int64]:
        """(S,)."""
        return np.array([shard.sizes[1] for shard in self.shards], dtype=np.int64)

    def shard_bytes(self, updates: bool) -> NDArray[np.float64]:
        """Return, (S,), bytes of each shard's rows; with `updates`, of optimizer state and kept
        gradients too."""
        elements = (self.shard_rows * self.shard_columns).astype(np.float64)
        total = elements * self.element_bytes
        if updates:
            total += (
                elements * self.update_bytes_per_element
                + self.shard_rows * self.update_bytes_per_row
            )
        return total

    @property
    def largest_shard_bytes(self) -> int:
        """Bytes of the rows of its largest shard."""
        return int((self.shard_rows * self.shard_columns).max(initial=0)) * self.element_bytes

    @property
    def on_host(self) -> bool:
        """Whether a GPU reads it from its host's memory."""
        return self.compute_kernel in HOST_KERNELS

    @property
    def learns(self) -> bool:
        """Whether gradients of its rows are exchanged."""
        return self.update != "frozen"

    def update_on(self, rank: int) -> float:
        """Return the milliseconds of a step that a rank updates this table; 0.0 where that was not
        estimated."""
        times = self.update_milliseconds
        return 0.0 if times is None else float(times[self.ranks == rank].sum())

    def for_torchrec(self, devices: list[str], first_rank: int = 0) -> ParameterSharding:
        """Return it as torchrec's sharders take it. devices, first_rank: see
        `ShardingPlan.for_torchrec`."""
        spec = None
        # torchrec's data_parallel has no spec: DDP holds a copy on every rank.
        if self.sharding_type != "data_parallel":
            spec = EnumerableShardingSpec([
                ShardMetadata(
                    list(offsets), list(sizes), f"rank:{first_rank + rank}/{devices[rank]}"
                )
                for rank, offsets, sizes in self.shards
            ])
        factor = self.cache_load_factor
        return ParameterSharding(
            sharding_type=self.sharding_type,
            compute_kernel=self.compute_kernel,
            ranks=[shard.rank for shard in self.shards],
            sharding_spec=spec,
            cache_params=None if factor is None else CacheParams(load_factor=factor),
        )

    @staticmethod
    def from_torchrec(
        table: Table, sharding: ParameterSharding, num_ranks: int, first_rank: int = 0
    ) -> "PlannedTable":
        """Return where `table` is in a plan of torchrec's. first_rank: see
        `ShardingPlan.for_torchrec`."""
        spec = sharding.sharding_spec
        cache = sharding.cache_params
        # A sharding without a spec is data_parallel: each rank has all of the table.
        if isinstance(spec, EnumerableShardingSpec):
            shards = in_order(_from_metadata(shard, first_rank) for shard in spec.shards)
        else:
            all_of_it = (table.config.num_embeddings, table.config.embedding_dim)
            shards = tuple(PlannedShard(rank, (0, 0), all_of_it) for rank in range(num_ranks))
        return PlannedTable.placed(
            table,
            sharding_type=sharding.sharding_type,
            compute_kernel=sharding.compute_kernel,
            shards=shards,
            cache_load_factor=None if cache is None else cache.load_factor,
        )


def in_order(shards: Iterable[PlannedShard]) -> tuple[PlannedShard, ...]:
    """Return shards in the order in which torchrec takes them: by columns, then rows."""
    return tuple(sorted(shards, key=lambda shard: (shard.offsets[1], shard.offsets[0], shard.rank)))


def _from_metadata(shard: ShardMetadata, first_rank: int) -> PlannedShard:
    (row, column) = shard.shard_offsets
    (rows, columns) = shard.shard_sizes
    # By its type a placement may be missing or lack a rank; those of torchrec's plans have one.
    rank: int = shard.placement.rank()  # type: ignore[union-attr, assignment]
    return PlannedShard(rank - first_rank, (row, column), (rows, columns))
