"""Where each table goes: rank 0 asks torchrec's planner, every rank receives the plan or the error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ParameterSharding

from lightning_distrec import errors
from lightning_distrec._compat import torchrec_quiet
from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.tables import SHARDING_TYPES, Table, TableOptions
from lightning_distrec.sharding.topology import RESERVED_SHARE, Places

Plan = dict[str, ParameterSharding]
"""Full name of a table -> how it is cut and which rank holds which shard."""

POOLED_TYPES = SHARDING_TYPES
SEQUENCE_TYPES = ("table_wise", "row_wise", "column_wise")
TWO_LEVEL_TYPES = ("table_row_wise", "table_column_wise", "grid_shard")
"""Cuts that give a table to some nodes, and cut it further among the ranks there."""


@dataclass(frozen=True)
class Demand:
    """What a table needs of its place."""

    sharding_types: tuple[str, ...]
    """Allowed ways to cut it."""
    kept_gradient: bool
    """Whether its gradient is kept and the user's own optimizer updates it, so that it must be in plain memory."""
    options: TableOptions


class _PooledSharder(EmbeddingBagCollectionSharder):
    """torchrec's sharder without the limit that hides row-wise cuts on CPU, where they work."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(POOLED_TYPES)


def sharders() -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of the two kinds of collection."""
    return [_PooledSharder(), EmbeddingCollectionSharder()]  # type: ignore[list-item]


def sharder_of(table: Table, comms: QuantizedComms) -> BaseEmbeddingSharder:
    """Return the sharder of `table`'s collection, whose rows and gradients travel in these types."""
    kind = _PooledSharder if table.pooled else EmbeddingCollectionSharder
    return kind(qcomm_codecs_registry=comms.registry())


def default_types(num_nodes: int) -> tuple[str, ...]:
    """Return the ways to cut a table that are tried where the user names none.

    data_parallel is planned on request only: the table is then held whole by every rank. The two-level cuts need two
    levels: on one node they are row_wise and column_wise with more steps.
    """
    types = ("table_wise", "row_wise", "column_wise")
    return types if num_nodes == 1 else (*types, "table_row_wise", "table_column_wise")


def allowed_types(table: Table, options: TableOptions, places: Places, whole_rows_for: str) -> tuple[str, ...]:
    """Return the ways in which `table` may be cut.

    whole_rows_for: the optimizer that keeps one number for a row, so that a row must stay on one rank; "" for none.
    Raises PlanError: nothing that the user allowed is left, with the reason.
    """
    possible = POOLED_TYPES if table.pooled else SEQUENCE_TYPES
    wanted = tuple(options.sharding_types or (t for t in default_types(places.num_nodes) if t in possible))
    reasons = {
        cut: _why_not(table, cut, places, whole_rows_for) or _why_not_columns(table, cut, options) for cut in wanted
    }
    types = tuple(cut for cut, reason in reasons.items() if not reason)
    if not types:
        raise PlanError(f"table '{table.full_name}': {'; '.join(f'{cut}: {why}' for cut, why in reasons.items())}.")
    return types


def _why_not(table: Table, cut: str, places: Places, whole_rows_for: str) -> str:
    if not table.pooled and cut not in SEQUENCE_TYPES:
        return f"an EmbeddingCollection's table can be cut {', '.join(SEQUENCE_TYPES)}"
    if not places.alike and cut in TWO_LEVEL_TYPES:
        return "the nodes have unequal numbers of ranks; allow table_wise, row_wise or column_wise"
    if whole_rows_for and "column" in cut:
        return (
            f"{whole_rows_for} keeps one number for a row, so that a row must stay whole; allow table_wise or row_wise"
        )
    ranks = {"row_wise": places.num_ranks, "table_row_wise": places.ranks_on_node}.get(cut, 1)
    rows = table.config.num_embeddings
    if -(-rows // -(-rows // ranks)) < ranks:
        # FBGEMM's kernels fail on a shard without rows, or read past their tables' sizes.
        return f"{rows} rows in equal blocks leave one of {ranks} ranks without any; allow table_wise"
    return ""


def _why_not_columns(table: Table, cut: str, options: TableOptions) -> str:
    width, dim = options.min_partition, table.config.embedding_dim
    if table.pooled or cut != "column_wise" or width is None or dim <= width or dim % width == 0:
        return ""
    return (
        f"min_partition={width} cuts {dim} columns into unequal shards, and torchrec needs one width for all of an "
        f"EmbeddingCollection; choose a divisor of {dim}"
    )


def check_sequence_widths(tables: list[Table], demands: Mapping[str, Demand]) -> None:
    """Raise PlanError where column-wise tables of one EmbeddingCollection would be cut into shards of unequal width."""
    for collection in dict.fromkeys(table.collection for table in tables if not table.pooled):
        mine = [table for table in tables if table.collection == collection]
        widths = {
            table.full_name: min(demand.options.min_partition or 0, table.config.embedding_dim)
            for table in mine
            for demand in [demands[table.full_name]]
            if "column_wise" in demand.sharding_types
        }
        if len(set(widths.values())) > 1:
            raise PlanError(
                f"tables of '{collection}' may be cut column_wise with unequal min_partition ({widths}), and torchrec "
                "needs one width for all of an EmbeddingCollection. Set the same min_partition for them, or leave "
                "column_wise out of their sharding_types."
            )


def make_plan(tables: list[Table], demands: Mapping[str, Demand], topology: Topology, batch_size: int) -> Plan:
    """Return a place for every table. Runs on one rank; see `plan_together`.

    Raises PlanError: the tables do not fit the topology's memory, with the largest table and the numbers.
    """
    check_sequence_widths(tables, demands)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=_constraints(tables, demands),
        storage_reservation=FixedPercentageStorageReservation(RESERVED_SHARE),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    tree, index = _tree(tables)
    try:
        with torchrec_quiet():
            found = planner.plan(tree, sharders())
    except PlannerError as error:
        raise PlanError(_why_no_plan(tables, topology, batch_size, error)) from error
    plan: Plan = {}
    for table in tables:
        plan[table.full_name] = found.plan[index[table.collection]][table.name]
    return plan


def plan_together(make: Callable[[], Plan]) -> Plan:
    """Collective. Run `make` on rank 0; every rank returns its plan, or raises its error."""
    answer: list[Plan | tuple[str, str] | None] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            failure = error
            answer[0] = (type(error).__name__, str(error))
    dist.broadcast_object_list(answer, src=0)
    if failure is not None:
        raise failure
    if isinstance(answer[0], tuple):
        name, message = answer[0]
        raise getattr(errors, name, PlanError)(message)
    assert answer[0] is not None
    return answer[0]


def _tree(tables: list[Table]) -> tuple[nn.Module, dict[str, str]]:
    """Return a module that holds the tables' collections and nothing else, and each collection's path in it.

    The planner walks a module by itself; the user's may hold torchrec modules that are not to be sharded.
    """
    collections = {table.collection: table.module for table in tables}
    index = {path: f"c{i}" for i, path in enumerate(collections)}
    tree = nn.Module()
    for path, module in collections.items():
        tree.add_module(index[path], module)
    return tree, index


def _constraints(tables: list[Table], demands: Mapping[str, Demand]) -> dict[str, ParameterConstraints]:
    """torchrec knows a constraint by the table's name alone: tables of one name get what suits them all."""
    constraints: dict[str, ParameterConstraints] = {}
    for table in tables:
        demand = demands[table.full_name]
        options = demand.options
        types = [t for t in demand.sharding_types if t in _types_so_far(constraints, table.name)]
        if not types:
            raise PlanError(
                f"table '{table.full_name}': another table is called '{table.name}' too, and no way to cut suits both. "
                "Give the tables different names."
            )
        factor = options.pooling_factor
        constraints[table.name] = ParameterConstraints(
            sharding_types=types,
            compute_kernels=_kernels(types, demand.kept_gradient or _in_plain_memory(constraints, table.name)),
            min_partition=options.min_partition,
            is_weighted=bool(getattr(table.module, "is_weighted", lambda: False)()),
            **({"pooling_factors": [factor] * len(table.config.feature_names)} if factor else {}),
        )
    return constraints


def _types_so_far(constraints: Mapping[str, ParameterConstraints], name: str) -> list[str]:
    known = constraints.get(name)
    return list(SHARDING_TYPES) if known is None else list(known.sharding_types or [])


def _in_plain_memory(constraints: Mapping[str, ParameterConstraints], name: str) -> bool:
    """Whether a table of this name must be in plain memory already."""
    known = constraints.get(name)
    return known is not None and EmbeddingComputeKernel.FUSED_UVM.value not in (known.compute_kernels or [])


def _kernels(types: list[str], plain_memory: bool) -> list[str]:
    kernels = [EmbeddingComputeKernel.FUSED]
    if not plain_memory:
        kernels += [EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.FUSED_UVM]
    if "data_parallel" in types:
        kernels.append(EmbeddingComputeKernel.DENSE)
    return [kernel.value for kernel in kernels]


def _why_no_plan(tables: list[Table], topology: Topology, batch_size: int, error: PlannerError) -> str:
    largest = max(tables, key=lambda t: t.parameter.numel() * t.parameter.element_size())
    size = largest.parameter.numel() * largest.parameter.element_size()
    total = sum(t.parameter.numel() * t.parameter.element_size() for t in tables)
    storage = topology.devices[0].storage
    memory = storage.hbm if topology.compute_device == "cuda" else storage.ddr
    usable = int(memory * (1 - RESERVED_SHARE))
    return (
        f"the tables do not fit: {len(tables)} tables of {total:,} bytes together, the largest "
        f"'{largest.full_name}' of {size:,} bytes, on {topology.world_size} ranks with {usable:,} bytes each for "
        f"tables and their exchange at batch_size_per_rank={batch_size} (memory_bytes_per_rank={memory:,} less "
        f"{RESERVED_SHARE:.0%}). Use more ranks, allow row_wise cuts, or give more memory. torchrec's planner says: "
        f"{str(error).strip().splitlines()[0]}"
    )
