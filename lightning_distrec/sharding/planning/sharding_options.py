"""The sharding options of each table, a sharding type with a kernel, with the estimates of
torchrec's estimators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

from lightning_distrec._compat.torchrec_modules import silence_torchrec
from lightning_distrec.sharding.planning.constraints import TableConstraints, torchrec_constraint
from lightning_distrec.sharding.planning.costs import (
    Links,
    exchange_milliseconds,
    make_links,
    narrow_rows_on_cpu,
    update_milliseconds,
)
from lightning_distrec.sharding.planning.sharding_plan import EXCHANGE_PARTS, ShardingPlan
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
    def device_bytes(self) -> NDArray[np.int64]:
        """(S,)."""
        return self.device_bytes_by_size[self.size_numbers]

    @cached_property
    def host_bytes(self) -> NDArray[np.int64]:
        """(S,)."""
        return self.host_bytes_by_size[self.size_numbers]


class _Shards(NamedTuple):
    """The shards of a table under one sharding type."""

    sizes: Cells
    offsets: Cells
    size_numbers: NDArray[np.intp]
    """The number of each shard's size among `distinct`."""
    distinct: list[tuple[int, int]]
    """The sizes, each once."""


class _Candidate(NamedTuple):
    """An option of a table, as torchrec's estimators take it, with all of its shards."""

    table: Table
    option: ShardingOption
    shards: _Shards


def estimated_options(
    tables: Sequence[Table],
    constraints: Mapping[str, TableConstraints],
    topology: Topology,
    batch_size: int,
) -> list[list[EstimatedOption]]:
    """Return the options of each table, in a fixed order. constraints: by full name."""
    kinds, requirements = sharders(), _for_torchrec(tables, constraints)
    candidates: list[_Candidate] = []
    for table in tables:
        sharder = next(s for s in kinds if isinstance(table.module, s.module_type))
        constraint = requirements[table.full_name]
        types = set(constraint.sharding_types or []) & set(
            sharder.sharding_types(topology.compute_device)
        )
        # Sorted, because the search depends on the order of options, and that of a set of strings
        # is random.
        for sharding_type in sorted(types):
            kernels = set(constraint.compute_kernels or [])
            kernels &= set(sharder.compute_kernels(sharding_type, topology.compute_device))
            # As torchrec's enumerator does: dense is no choice where there is a fused kernel.
            kernels -= {"dense"} if "fused" in kernels else set()
            sizes, offsets = calculate_shard_sizes_and_offsets(
                tensor=table.parameter,
                world_size=topology.world_size,
                local_world_size=topology.local_world_size,
                sharding_type=sharding_type,
                col_wise_shard_dim=constraint.min_partition,
            )
            shards = _number_sizes(
                tuple((rows, columns) for rows, columns in sizes),
                tuple((row, column) for row, column in offsets),
            )
            candidates += [
                _candidate(table, sharding_type, kernel, shards, constraint, batch_size)
                for kernel in sorted(kernels)
            ]
    options_by_table: dict[str, list[EstimatedOption]] = {table.full_name: [] for table in tables}
    estimated = _estimate(candidates, constraints, requirements, topology, batch_size)
    for candidate, option in zip(candidates, estimated, strict=True):
        options_by_table[candidate.table.full_name].append(option)
    return list(options_by_table.values())


def options_of_plan(
    tables: Sequence[Table],
    plan: ShardingPlan,
    constraints: Mapping[str, TableConstraints],
    topology: Topology,
    batch_size: int,
) -> list[EstimatedOption]:
    """Return the option that a plan has for each table, with its estimates. Arguments as
    `estimated_options`."""
    candidates, requirements = [], _for_torchrec(tables, constraints)
    for table in tables:
        planned, constraint = plan.tables[table.full_name], requirements[table.full_name]
        sizes, offsets = zip(
            *((shard.sizes, shard.offsets) for shard in planned.shards), strict=True
        )
        shards = _number_sizes(sizes, offsets)
        kernel = planned.compute_kernel
        candidates.append(
            _candidate(table, planned.sharding_type, kernel, shards, constraint, batch_size)
        )
    return _estimate(candidates, constraints, requirements, topology, batch_size)


def _for_torchrec(
    tables: Sequence[Table], constraints: Mapping[str, TableConstraints]
) -> dict[str, ParameterConstraints]:
    # By full name, where torchrec has the name alone, which tables of two collections may share.
    return {
        table.full_name: torchrec_constraint(table, constraints[table.full_name])
        for table in tables
    }


def _number_sizes(sizes: Cells, offsets: Cells) -> _Shards:
    # The number of a size that is new is the number of sizes before it: the dict's length, read
    # before it is added.
    numbers: dict[tuple[int, int], int] = {}
    size_numbers = np.array(
        [numbers.setdefault(size, len(numbers)) for size in sizes], dtype=np.intp
    )
    return _Shards(sizes, offsets, size_numbers, list(numbers))


def _candidate(
    table: Table,
    sharding_type: str,
    kernel: str,
    shards: _Shards,
    constraint: ParameterConstraints,
    batch_size: int,
) -> _Candidate:
    option = ShardingOption(
        name=table.full_name,
        tensor=table.parameter,
        module=(table.collection, table.module),
        input_lengths=constraint.pooling_factors,
        batch_size=batch_size,
        compute_kernel=kernel,
        sharding_type=sharding_type,
        partition_by=get_partition_by_type(sharding_type),
        # torchrec's estimators look at each shard. Shards of one size cost the same, so that they
        # get one of each, at any offset: a row-wise table on a thousand ranks has a thousand
        # shards, and two sizes.
        shards=[Shard(size=list(size), offset=[0, 0]) for size in shards.distinct],
        cache_params=constraint.cache_params,
        enforce_hbm=constraint.enforce_hbm,
        is_pooled=table.pooled,
        output_dtype=constraint.output_dtype,
    )
    return _Candidate(table, option, shards)


def _estimate(
    candidates: list[_Candidate],
    constraints: Mapping[str, TableConstraints],
    requirements: dict[str, ParameterConstraints],
    topology: Topology,
    batch_size: int,
) -> list[EstimatedOption]:
    with silence_torchrec():
        enumerator = EmbeddingEnumerator(
            topology=topology, batch_size=batch_size, constraints=requirements
        )
        # An empty module: the enumerator lists no options of its own, and only registers the
        # sharders.
        enumerator.enumerate(nn.Module(), sharders())
        enumerator.populate_estimates([candidate.option for candidate in candidates])
    links = make_links(topology)
    return [
        _as_estimated(
            option,
            shards,
            topology,
            links,
            constraints[option.name],
            bool(requirements[option.name].is_weighted),
        )
        for _, option, shards in candidates
    ]


def _as_estimated(
    option: ShardingOption,
    shards: _Shards,
    topology: Topology,
    links: Links,
    constraints: TableConstraints,
    is_weighted: bool,
) -> EstimatedOption:
    # torchrec's estimators do not know what our updates keep: gradients, optimizer state
    per_element, per_row = constraints.bytes_per_element, constraints.bytes_per_row
    sizes = [(shard.size[0], shard.size[1]) for shard in option.shards]
    update_bytes = np.array([
        round(rows * columns * per_element + rows * per_row) for rows, columns in sizes
    ])
    on_gpu, on_host = (
        topology.compute_device == "cuda",
        option.compute_kernel.startswith("fused_uvm"),
    )
    storages: list[Any] = [shard.storage for shard in option.shards]
    device_bytes = np.asarray([s.hbm if on_gpu else s.ddr for s in storages], dtype=np.int64)
    # On CPU torchrec counts all memory as ddr, which is `device` here: it must not count twice.
    host_bytes = np.asarray([s.ddr if on_gpu else 0 for s in storages], dtype=np.int64)
    # State lies next to its rows: with both fused_uvm kernels in the host's memory, even of rows
    # that are cached.
    if on_host:
        host_bytes += update_bytes
    else:
        device_bytes += update_bytes
    # torchrec estimates each block of rows as if all of the table's ids went there. A replica looks
    # up the ids of its own rank's batch, a shard those of the batches of all ranks.
    is_replicated = option.sharding_type == "data_parallel"
    blocks = 1 if is_replicated else len({row for row, _ in shards.offsets})
    ids = (
        option.batch_size
        * (1 if is_replicated else topology.world_size)
        * sum(option.input_lengths)
        / blocks
    )
    speed = topology.hbm_mem_bw if on_gpu else topology.ddr_mem_bw
    updates = update_milliseconds(
        sizes, constraints, ids, on_gpu, topology.hbm_to_ddr_mem_bw if on_host else speed
    )
    exchanges = exchange_milliseconds(option, constraints, is_weighted, links)
    parts = []
    for shard, (ids_time, rows_time, gradients_time), update in zip(
        option.shards, exchanges, updates, strict=True
    ):
        perf: Any = shard.perf
        share = 1.0 if on_gpu else narrow_rows_on_cpu(option.sharding_type, shard.size[1])
        forward, backward = perf.fwd_compute * share, perf.bwd_compute * share
        # In the order of TIME_PARTS.
        parts.append((
            forward,
            rows_time,
            backward,
            gradients_time,
            perf.prefetch_compute,
            ids_time,
            update,
        ))
    return EstimatedOption(
        option.sharding_type,
        option.compute_kernel,
        shards.sizes,
        shards.offsets,
        shards.size_numbers,
        np.asarray(parts, dtype=np.float64),
        device_bytes,
        host_bytes,
        None if option.cache_params is None else option.cache_params.load_factor,
    )


def without_duplicates(options: Sequence[EstimatedOption]) -> list[EstimatedOption]:
    """Return the options without column-wise ones of one shard where the same kernel can have the
    table table_wise."""
    kernels = {option.kernel for option in options if option.sharding_type == "table_wise"}
    # Such an option is a table_wise one with another name; twice the options would only make the
    # search longer.
    column_types = ("column_wise", "table_column_wise")
    return [
        o
        for o in options
        if not (
            o.sharding_type in column_types and len(o.size_numbers) == 1 and o.kernel in kernels
        )
    ]
