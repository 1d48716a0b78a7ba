"""The ways in which each table can be cut and kept, and what torchrec's estimators say of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.types import CollectiveType, Shard, ShardingOption
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import CacheParams, EnumerableShardingSpec, ModuleSharder

from lightning_distrec._compat.torchrec import silence_torchrec
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.tables import Table

Cells = tuple[tuple[int, int], ...]
"""Sizes, or offsets, of a table's shards: (rows, columns) of each."""


@dataclass(frozen=True, eq=False)
class EstimatedOption:
    """One way to cut a table, kept by one kernel. S is the number of its shards, D that of unlike ones among them."""

    cut: str
    kernel: str
    sizes: Cells
    """S."""
    offsets: Cells
    which: NDArray[np.intp]
    """(S,): the unlike shard that each shard is like."""
    milliseconds_by_part: NDArray[np.float64]
    """(D, 6): estimates of an unlike shard's time in a step, by `TIME_PARTS`."""
    device_bytes_of_unlike: NDArray[np.int64]
    """(D,): what such a shard takes of its rank's GPU; on CPU, of its rank's host."""
    host_bytes_of_unlike: NDArray[np.int64]
    """(D,): what it takes of the host beside a GPU; 0 on CPU."""
    cache_params: CacheParams | None = None
    """What a kernel that caches rows was told of its cache."""

    @cached_property
    def milliseconds(self) -> NDArray[np.float64]:
        """(S,): each shard's time in a step."""
        shards: NDArray[np.float64] = self.milliseconds_by_part.sum(axis=1)[self.which]
        return shards

    @cached_property
    def device_bytes(self) -> NDArray[np.int64]:
        """(S,)."""
        return self.device_bytes_of_unlike[self.which]

    @cached_property
    def host_bytes(self) -> NDArray[np.int64]:
        """(S,)."""
        return self.host_bytes_of_unlike[self.which]


def choices_of(
    tables: Sequence[Table],
    constraints: Mapping[str, ParameterConstraints],
    topology: Topology,
    batch_size: int,
    sharders: Sequence[ModuleSharder[nn.Module]],
    update_bytes: Mapping[str, tuple[float, float]],
) -> list[list[EstimatedOption]]:
    """Return the choices of each table, in a fixed order.

    constraints: by table name. update_bytes: full name -> bytes per element and per row that the table's update keeps
    beside the rows (gradients, optimizer state), which torchrec's estimators do not know of.

    torchrec's enumerator lists shards one by one, and its estimators look at each; of shards of one size, which cost
    alike, only the first is shown to them here.
    """
    options: list[ShardingOption] = []
    made: list[tuple[int, Cells, Cells, NDArray[np.intp]]] = []
    for number, table in enumerate(tables):
        sharder = next(s for s in sharders if isinstance(table.module, s.module_type))
        constraint = constraints[table.name]
        for cut in sorted(set(constraint.sharding_types or []) & set(sharder.sharding_types(topology.compute_device))):
            kernels = set(constraint.compute_kernels or [])
            kernels &= set(sharder.compute_kernels(cut, topology.compute_device))
            sizes, offsets, which, first = _shards(table, cut, topology, constraint.min_partition)
            for kernel in sorted(_without_spare(kernels)):
                options.append(_option(table, cut, kernel, [sizes[i] for i in first], constraint, batch_size))
                made.append((number, sizes, offsets, which))
    _estimate(options, topology, batch_size, constraints, sharders)
    found: list[list[EstimatedOption]] = [[] for _ in tables]
    for option, (number, sizes, offsets, which) in zip(options, made, strict=True):
        kept = update_bytes.get(tables[number].full_name, (0.0, 0.0))
        found[number].append(_choice(option, sizes, offsets, which, topology, kept))
    return found


def estimated(
    tables: Sequence[Table],
    plan: ShardingByTable,
    constraints: Mapping[str, ParameterConstraints],
    topology: Topology,
    batch_size: int,
    sharders: Sequence[ModuleSharder[nn.Module]],
    update_bytes: Mapping[str, tuple[float, float]],
) -> list[EstimatedOption]:
    """Return the choice that a plan holds for each table, with its estimates. Arguments as those of `choices_of`."""
    options, made = [], []
    for table in tables:
        sharding = plan[table.full_name]
        whole = (table.config.num_embeddings, table.config.embedding_dim)
        if isinstance(sharding.sharding_spec, EnumerableShardingSpec):
            shards = sharding.sharding_spec.shards
            sizes: Cells = tuple((s.shard_sizes[0], s.shard_sizes[1]) for s in shards)
            offsets: Cells = tuple((s.shard_offsets[0], s.shard_offsets[1]) for s in shards)
        else:
            sizes, offsets = (whole,) * topology.world_size, ((0, 0),) * topology.world_size
        which, first = _unlike(sizes)
        cut, kernel, constraint = sharding.sharding_type, sharding.compute_kernel, constraints[table.name]
        options.append(_option(table, cut, kernel, [sizes[i] for i in first], constraint, batch_size))
        made.append((sizes, offsets, which))
    _estimate(options, topology, batch_size, constraints, sharders)
    kept = [update_bytes.get(table.full_name, (0.0, 0.0)) for table in tables]
    return [
        _choice(option, sizes, offsets, which, topology, of_update)
        for option, (sizes, offsets, which), of_update in zip(options, made, kept, strict=True)
    ]


def _without_spare(kernels: set[str]) -> set[str]:
    """Return the kernels but for dense, where there is a fused one, as torchrec's enumerator does."""
    return kernels - {"dense"} if "fused" in kernels else kernels


def _shards(
    table: Table, cut: str, topology: Topology, min_partition: int | None
) -> tuple[Cells, Cells, NDArray[np.intp], list[int]]:
    """Return sizes and offsets of all shards, and what `_unlike` says of them."""
    sizes, offsets = calculate_shard_sizes_and_offsets(
        tensor=table.parameter,
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        sharding_type=cut,
        col_wise_shard_dim=min_partition,
    )
    cells = tuple((rows, columns) for rows, columns in sizes)
    return cells, tuple((rows, columns) for rows, columns in offsets), *_unlike(cells)


def _unlike(sizes: Cells) -> tuple[NDArray[np.intp], list[int]]:
    """Return the unlike shard that each is like, and the first of each unlike one."""
    unlike: dict[tuple[int, int], int] = {}
    first: list[int] = []
    which = np.empty(len(sizes), dtype=np.intp)
    for i, size in enumerate(sizes):
        kind = unlike.setdefault(size, len(unlike))
        if kind == len(first):
            first.append(i)
        which[i] = kind
    return which, first


def _option(
    table: Table, cut: str, kernel: str, sizes: list[tuple[int, int]], constraint: ParameterConstraints, batch_size: int
) -> ShardingOption:
    return ShardingOption(
        name=table.name,
        tensor=table.parameter,
        module=(table.collection, table.module),
        input_lengths=constraint.pooling_factors,
        batch_size=batch_size,
        compute_kernel=kernel,
        sharding_type=cut,
        partition_by=get_partition_by_type(cut),
        shards=[Shard(size=list(size), offset=[0, 0]) for size in sizes],
        cache_params=constraint.cache_params,
        enforce_hbm=constraint.enforce_hbm,
        is_pooled=table.pooled,
        output_dtype=constraint.output_dtype,
    )


def _estimate(
    options: list[ShardingOption],
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> None:
    with silence_torchrec():
        enumerator = EmbeddingEnumerator(topology=topology, batch_size=batch_size, constraints=dict(constraints))
        enumerator.enumerate(nn.Module(), list(sharders))  # of nothing: it only gets to know the sharders
        enumerator.populate_estimates(options)


def _choice(
    option: ShardingOption,
    sizes: Cells,
    offsets: Cells,
    which: NDArray[np.intp],
    topology: Topology,
    update_bytes: tuple[float, float],
) -> EstimatedOption:
    kept = [round(r * c * update_bytes[0] + r * update_bytes[1]) for r, c in (shard.size for shard in option.shards)]
    on_gpu = topology.compute_device == "cuda"
    device_bytes = [_on_device(shard.storage, topology.compute_device) for shard in option.shards]
    host_bytes = [shard.storage.ddr if on_gpu else 0 for shard in option.shards]
    if option.compute_kernel.startswith("fused_uvm"):
        host_bytes = [a + b for a, b in zip(host_bytes, kept, strict=True)]
    else:
        device_bytes = [a + b for a, b in zip(device_bytes, kept, strict=True)]
    perfs = [shard.perf for shard in option.shards]
    # torchrec reckons for each block of rows as if all of the table's ids went there ...
    blocks = len({row for row, _ in offsets}) if option.sharding_type != "data_parallel" else 1
    # ... and as if rows were summed that come one for each id.
    sums = _sums_over_rows(topology) if option.sharding_type == "row_wise" and not option.is_pooled else 1.0
    parts = [
        (p.fwd_compute, p.fwd_comms / sums, p.bwd_compute, p.bwd_comms, p.prefetch_compute, p.input_dist_comms / blocks)
        for p in perfs
    ]
    return EstimatedOption(
        option.sharding_type,
        option.compute_kernel,
        sizes,
        offsets,
        which,
        np.asarray(parts, dtype=np.float64),
        np.asarray(device_bytes, dtype=np.int64),
        np.asarray(host_bytes, dtype=np.int64),
        option.cache_params,
    )


def _sums_over_rows(topology: Topology) -> float:
    """Return how many times longer a reduce-scatter over all ranks takes than an all-to-all of as many bytes."""
    speeds = [
        topology.comms_bandwidths.get_bw(
            local_world_size=topology.local_world_size, world_size=topology.world_size, collective_type=kind
        )
        for kind in (CollectiveType.ALL_TO_ALL, CollectiveType.REDUCE_SCATTER)
    ]
    return speeds[0] / speeds[1]


def _on_device(storage: Any, device: str) -> int:
    return int(storage.hbm if device == "cuda" else storage.ddr)


def unlike(choices: Sequence[EstimatedOption]) -> list[EstimatedOption]:
    """Return the choices without those that are another by a longer name: one column block is the whole table."""
    whole = {choice.kernel for choice in choices if choice.cut == "table_wise"}
    blocks = ("column_wise", "table_column_wise")
    return [c for c in choices if not (c.cut in blocks and len(c.which) == 1 and c.kernel in whole)]


def capacities(topology: Topology) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes of every rank's device, and of its part of the host beside it (0 on CPU): (R,) and (R,)."""
    storages = [device.storage for device in topology.devices]
    cuda = topology.compute_device == "cuda"
    device = np.asarray([_on_device(storage, topology.compute_device) for storage in storages], dtype=np.int64)
    host = np.asarray([storage.ddr if cuda else 0 for storage in storages], dtype=np.int64)
    return device, host
