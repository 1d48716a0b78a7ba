"""The sharding options of each table, a sharding type with a kernel, with the estimates of
torchrec's estimators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

from lightning_distrec.sharding.planning.constraints import TableConstraints, torchrec_constraint
from lightning_distrec.sharding.planning.costs import (
    exchange_milliseconds,
    make_links,
    narrow_rows_on_cpu,
    update_milliseconds,
)
from lightning_distrec.sharding.planning.planned_table import PlannedTable
from lightning_distrec.sharding.planning.sharding_plan import EXCHANGE_PARTS
from lightning_distrec.sharding.sharders import sharders
from lightning_distrec.sharding.tables import Table

Cells = tuple[tuple[int, int], ...]
"""Sizes, or offsets, of a table's shards: (rows, columns) of each."""


@dataclass(frozen=True, eq=False)
class EstimatedOption:
    """One sharding type of a table with one kernel. S is the number of its shards, D that of their
    distinct sizes."""

    sharding_type: str
    kernel: str
    sizes: Cells
    """S."""
    offsets: Cells
    size_numbers: NDArray[np.intp]
    """(S,): the number of each shard's size."""
    milliseconds_by_part: NDArray[np.float64]
    """(D, 7): estimated time of a shard of each size in a step, by `TIME_PARTS`."""
    device_bytes_by_size: NDArray[np.int64]
    """(D,): what such a shard takes of its rank's GPU; on CPU, of its rank's host."""
    host_bytes_by_size: NDArray[np.int64]
    """(D,): what it takes of the host's memory next to a GPU; 0 on CPU."""
    cache_load_factor: float | None = None
    """Share of the rows in the cache of a fused_uvm_caching table."""

    @cached_property
    def milliseconds(self) -> NDArray[np.float64]:
        """(S,): each shard's time in a step."""
        shards: NDArray[np.float64] = self.milliseconds_by_part.sum(axis=1)[self.size_numbers]
        return shards

    @cached_property
    def exchange(self) -> NDArray[np.float64]:
        """(3, S): of it, in each exchange, in the order of `EXCHANGE_PARTS`."""
        exchange: NDArray[np.float64] = self.milliseconds_by_part[self.size_numbers][
            :, EXCHANGE_PARTS
        ].T.copy()
        return exchange

    @cached_property
    def compute(self) -> NDArray[np.float64]:
        """(S,): of it, without exchanges."""
        compute: NDArray[np.float64] = self.milliseconds - self.exchange.sum(axis=0)
        return compute

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """(4, S): `compute`, then `exchange`."""
        return np.concatenate([self.compute[None], self.exchange])

    @cached_property
    def longest(self) -> float:
        """Of the shards' times."""
        return float(self.milliseconds.max())

    @cached_property
    def device_bytes(self) -> NDArray[np.int64]:
        """(S,)."""
        return self.device_bytes_by_size[self.size_numbers]

    @cached_property
    def host_bytes(self) -> NDArray[np.int64]:
        """(S,)."""
        return self.host_bytes_by_size[self.size_numbers]


class OptionEstimator:
    """Estimates sharding options of tables, by torchrec's estimators and our costs.

    constraints: by full name. topology: its memory is of no interest here.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        constraints: Mapping[str, TableConstraints],
        topology: Topology,
        batch_size: int,
    ) -> None:
        self._constraints = constraints
        self._topology = topology
        self._batch_size = batch_size
        # By full name, where torchrec has the name alone, which tables of two collections may
        # share.
        self._requirements = {
            table.full_name: torchrec_constraint(table, constraints[table.full_name])
            for table in tables
        }
        self._links = make_links(topology)
        self._enumerator = EmbeddingEnumerator(
            topology=topology,
            batch_size=batch_size,
            constraints=self._requirements,
            estimator=_estimators(topology, self._requirements),
        )
        # An empty module: the enumerator lists no options of its own, and only registers the
        # sharders.
        self._sharders = sharders()
        self._enumerator.enumerate(nn.Module(), self._sharders)

    def options_of(self, table: Table) -> list[EstimatedOption]:
        """Return all options of a table, in a fixed order; those of a type by time."""
        constraint = self._requirements[table.full_name]
        topology = self._topology
        device = topology.compute_device
        (sharder,) = [s for s in self._sharders if isinstance(table.module, s.module_type)]
        types = set(constraint.sharding_types or []) & set(sharder.sharding_types(device))
        options = []
        # Sorted, because the search depends on the order of options, and that of a set of strings
        # is random.
        for sharding_type in sorted(types):
            kernels = set(constraint.compute_kernels or [])
            kernels &= set(sharder.compute_kernels(sharding_type, device))
            # As torchrec's enumerator does: dense is no choice where there is a fused kernel.
            kernels -= {"dense"} if "fused" in kernels else set()
            sizes, offsets = calculate_shard_sizes_and_offsets(
                tensor=table.parameter,
                world_size=topology.world_size,
                local_world_size=topology.local_world_size,
                sharding_type=sharding_type,
                col_wise_shard_dim=constraint.min_partition,
            )
            cells = tuple(map(tuple, sizes)), tuple(map(tuple, offsets))
            by_kernel = [
                self._estimate(table, sharding_type, kernel, *cells) for kernel in sorted(kernels)
            ]
            options += sorted(by_kernel, key=lambda option: option.longest)
        return options

    def planned_option(self, table: Table, planned: PlannedTable) -> EstimatedOption:
        """Return the option that a plan has for a table."""
        sizes = tuple(shard.sizes for shard in planned.shards)
        offsets = tuple(shard.offsets for shard in planned.shards)
        kind = planned.sharding_type
        kernel = planned.compute_kernel
        return self._estimate(table, kind, kernel, sizes, offsets)

    def _estimate(
        self, table: Table, sharding_type: str, kernel: str, sizes: Cells, offsets: Cells
    ) -> EstimatedOption:
        constraint = self._requirements[table.full_name]
        # torchrec's estimators look at each shard. Shards of one size cost the same, so that they
        # get one of each, at any offset: a row-wise table on a thousand ranks has a thousand
        # shards, and two sizes.
        distinct = {size: number for number, size in enumerate(dict.fromkeys(sizes))}
        option = ShardingOption(
            name=table.full_name,
            tensor=table.parameter,
            module=(table.collection, table.module),
            input_lengths=constraint.pooling_factors,
            batch_size=self._batch_size,
            compute_kernel=kernel,
            sharding_type=sharding_type,
            partition_by=get_partition_by_type(sharding_type),
            shards=[Shard(size=list(size), offset=[0, 0]) for size in distinct],
            cache_params=constraint.cache_params,
            is_pooled=table.pooled,
        )
        self._enumerator.populate_estimates([option])
        device_bytes, host_bytes = self._memory(option, list(distinct))
        return EstimatedOption(
            sharding_type,
            kernel,
            sizes,
            offsets,
            np.array([distinct[size] for size in sizes], dtype=np.intp),
            self._times(option, list(distinct), len({row for row, _ in offsets})),
            device_bytes,
            host_bytes,
            None if option.cache_params is None else option.cache_params.load_factor,
        )

    def _memory(
        self, option: ShardingOption, sizes: list[tuple[int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what a shard of each size takes of its device and of the host beside it, (D,)."""
        constraints = self._constraints[option.name]
        per_element = constraints.bytes_per_element
        per_row = constraints.bytes_per_row
        on_gpu = self._topology.compute_device == "cuda"
        device_bytes = []
        host_bytes = []
        for (rows, columns), shard in zip(sizes, option.shards, strict=True):
            storage: Any = shard.storage
            # On CPU torchrec counts all memory as ddr, which is `device` here: it must not count
            # twice.
            on_device = storage.hbm if on_gpu else storage.ddr
            on_host = storage.ddr if on_gpu else 0
            # torchrec's estimators do not know what our updates keep: gradients, optimizer state.
            # It lies next to its rows: with both fused_uvm kernels in the host's memory, even of
            # rows that are cached.
            update_bytes = round(rows * columns * per_element + rows * per_row)
            if option.compute_kernel.startswith("fused_uvm"):
                on_host += update_bytes
            else:
                on_device += update_bytes
            device_bytes.append(on_device)
            host_bytes.append(on_host)
        return np.array(device_bytes, dtype=np.int64), np.array(host_bytes, dtype=np.int64)

    def _times(
        self, option: ShardingOption, sizes: list[tuple[int, int]], num_blocks: int
    ) -> NDArray[np.float64]:
        """Return, (D, 7), the time of a shard of each size by `TIME_PARTS`. num_blocks: of rows."""
        constraints = self._constraints[option.name]
        topology = self._topology
        on_gpu = topology.compute_device == "cuda"
        # torchrec estimates each block of rows as if all of the table's ids went there. A replica
        # looks up the ids of its own rank's batch, a shard those of the batches of all ranks.
        ids = option.batch_size * sum(option.input_lengths)
        if option.sharding_type != "data_parallel":
            ids = ids * topology.world_size / num_blocks
        speed = topology.hbm_mem_bw if on_gpu else topology.ddr_mem_bw
        if option.compute_kernel.startswith("fused_uvm"):
            speed = topology.hbm_to_ddr_mem_bw
        updates = update_milliseconds(sizes, constraints, ids, on_gpu, speed)
        is_weighted = bool(self._requirements[option.name].is_weighted)
        exchanges = exchange_milliseconds(option, constraints, is_weighted, self._links)
        parts = []
        for shard, exchange, update in zip(option.shards, exchanges, updates, strict=True):
            perf: Any = shard.perf
            ids_time, rows_time, gradients_time = exchange
            share = 1.0
            if not on_gpu:
                share = narrow_rows_on_cpu(option.sharding_type, shard.size[1])
            forward = perf.fwd_compute * share
            backward = perf.bwd_compute * share
            prefetch = perf.prefetch_compute
            # In the order of TIME_PARTS.
            parts.append((forward, rows_time, backward, gradients_time, prefetch, ids_time, update))
        return np.asarray(parts, dtype=np.float64)


def _estimators(topology: Topology, constraints: dict[str, Any]) -> list[Any] | None:
    """Return torchrec's default estimators, which estimate in half the time; None: its own."""
    try:
        from torchrec.distributed.planner import estimator
    except ImportError:  # before torchrec 1.8
        return None

    class PlainConfig(estimator.EmbeddingPerfEstimatorConfig):
        # torchrec looks through all names of a config for methods of some hardware, 20 times for
        # each option. The default one has none.
        def __dir__(self) -> list[str]:
            return []

    times = estimator.EmbeddingPerfEstimatorFactory.create_with_config(
        PlainConfig(), topology=topology, constraints=constraints
    )
    return [times, EmbeddingStorageEstimator(topology=topology, constraints=constraints)]


def without_duplicates(options: Sequence[EstimatedOption]) -> list[EstimatedOption]:
    """Return the options without column-wise ones of one shard where the same kernel can have the
    table table_wise."""
    kernels = {option.kernel for option in options if option.sharding_type == "table_wise"}
    # Such an option is a table_wise one with another name; twice the options would only make the
    # search longer.
    column_types = ("column_wise", "table_column_wise")
    remaining = []
    for option in options:
        is_one_shard = option.sharding_type in column_types and len(option.size_numbers) == 1
        if not (is_one_shard and option.kernel in kernels):
            remaining.append(option)
    return remaining
