"""What the planner may do with each table: its sharding types, its kernels, and what its update
keeps in memory."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.types import CacheParams

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.sharders import (
    HOST_KERNELS,
    KERNELS,
    POOLED_TYPES,
    SEQUENCE_TYPES,
    TWO_LEVEL_TYPES,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table


@dataclass(frozen=True)
class TableConstraints:
    """What the planner may do with a table, and what the table's update needs."""

    sharding_types: tuple[str, ...]
    """Allowed sharding types."""
    kept_gradient: bool
    """Whether the user's own optimizer updates it with a gradient that is kept, which needs rows in
    plain memory."""
    options: TableOptions
    bytes_per_element: float = 0.0
    """What its update keeps for each element: a gradient, optimizer state."""
    bytes_per_row: float = 0.0
    """What its update keeps for each row."""
    unsplit_rows_for: str = ""
    """The optimizer that keeps one number for each row, so that a row must stay on one rank; "" for
    none."""
    compute_kernels: tuple[str, ...] = KERNELS
    """Allowed kernels; torchrec leaves out those that are not possible."""
    pooling_factors: tuple[float, ...] | None = None
    """Ids per example of each of its features, if they were counted."""
    distinct_share: float | None = None
    """Different ids over ids of a batch, feature by feature, if they were counted."""
    update: str = "fused"
    """The kind of its update, for reports."""
    optimizer: str = ""
    """Class of the optimizer that updates it."""
    update_reason: str = ""
    """Why the update is of that kind, for reports."""


def default_types(num_nodes: int) -> tuple[str, ...]:
    """Return the sharding types that are tried where the user names none."""
    # data_parallel is planned on request only, because every rank then holds all of the table. The
    # two-level types need several nodes: on one node they are row_wise and column_wise with more
    # steps.
    types = ("table_wise", "row_wise", "column_wise")
    return types if num_nodes == 1 else (*types, "table_row_wise", "table_column_wise")


def allowed_types(
    table: Table, options: TableOptions, layout: NodeLayout, unsplit_rows_for: str
) -> tuple[str, ...]:
    """Return the sharding types that `table` may have. Raises PlanError: none that the user allowed
    is possible."""
    possible = POOLED_TYPES if table.pooled else SEQUENCE_TYPES
    # Defaults that an EmbeddingCollection cannot have are left out silently;
    # types that the user named get a reason below.
    requested = tuple(
        options.sharding_types or (t for t in default_types(layout.num_nodes) if t in possible)
    )
    reasons = {
        kind: type_obstacle(table, kind, layout, unsplit_rows_for)
        or _width_obstacle(table, kind, options)
        for kind in requested
    }
    types = tuple(kind for kind, reason in reasons.items() if not reason)
    if not types:
        raise PlanError(
            f"table '{table.full_name}': "
            f"{'; '.join(f'{kind}: {reason}' for kind, reason in reasons.items())}."
        )
    return types


def type_obstacle(
    table: Table, sharding_type: str, layout: NodeLayout, unsplit_rows_for: str
) -> str:
    """Return why a table cannot have a sharding type on these ranks; "" where it can."""
    if not table.pooled and sharding_type not in SEQUENCE_TYPES:
        return f"an EmbeddingCollection's table can be {', '.join(SEQUENCE_TYPES)}"
    if layout.num_replicas > 1 and sharding_type in (*TWO_LEVEL_TYPES, "data_parallel"):
        # torchrec makes both over the nodes, and over the ranks, of the whole job.
        return (
            "it is not possible within sharding_groups; allow table_wise, row_wise or column_wise"
        )
    if not layout.alike and sharding_type in TWO_LEVEL_TYPES:
        return (
            "the nodes have unequal numbers of ranks, or ranks that are not numbered "
            "consecutively; allow table_wise, row_wise or column_wise"
        )
    if unsplit_rows_for and "column" in sharding_type:
        return (
            f"{unsplit_rows_for} keeps one number for each row, so that a row must stay on one "
            "rank; allow table_wise or row_wise"
        )
    # torchrec gives each rank ceil(rows / ranks) rows, so that the last ranks may get none:
    # 5 rows on 4 ranks are 2, 2, 1 and 0.
    ranks = {"row_wise": layout.num_ranks, "table_row_wise": layout.ranks_on_node}.get(
        sharding_type, 1
    )
    rows = table.config.num_embeddings
    if -(-rows // -(-rows // ranks)) < ranks:
        # FBGEMM's kernels fail on a shard without rows, or read past their tables' sizes.
        return (
            f"{rows} rows in equal blocks leave one of {ranks} ranks without any; allow table_wise"
        )
    return ""


def _width_obstacle(table: Table, sharding_type: str, options: TableOptions) -> str:
    width = options.min_partition
    dim = table.config.embedding_dim
    if (
        table.pooled
        or sharding_type != "column_wise"
        or width is None
        or dim <= width
        or dim % width == 0
    ):
        return ""
    return (
        f"min_partition={width} divides {dim} columns into unequal shards, and torchrec needs one "
        f"width for all of an EmbeddingCollection; choose a divisor of {dim}"
    )


def allowed_kernels(
    table: Table, types: Iterable[str], options: TableOptions, kept_gradient: bool, device: str
) -> tuple[str, ...]:
    """Return the kernels that may look up `table` if it has one of the sharding types `types`.

    Raises PlanError: none that the user allowed is possible; a cache for a table that cannot have
    one.
    """
    types = list(types)
    requested = options.compute_kernels or KERNELS
    reasons = {
        kernel: _kernel_obstacle(kernel, types, kept_gradient, device) for kernel in requested
    }
    kernels = tuple(kernel for kernel, reason in reasons.items() if not reason)
    if not kernels:
        raise PlanError(
            f"table '{table.full_name}': compute_kernels={list(requested)}: "
            f"{'; '.join(f'{kernel}: {reason}' for kernel, reason in reasons.items())}."
        )
    if options.cache_load_factor is not None and "fused_uvm_caching" not in kernels:
        raise PlanError(
            f"table '{table.full_name}': cache_load_factor={options.cache_load_factor} is for a "
            "fused_uvm_caching table, which this one cannot be: "
            f"{_kernel_obstacle('fused_uvm_caching', types, kept_gradient, device)}. Leave "
            "cache_load_factor out."
        )
    return kernels


def _kernel_obstacle(kernel: str, types: list[str], kept_gradient: bool, device: str) -> str:
    if kernel == "dense":
        return (
            ""
            if "data_parallel" in types
            else ("is for tables whose sharding_types are data_parallel; allow fused")
        )
    if types == ["data_parallel"]:
        return "a data_parallel table has the dense kernel; allow dense"
    if kernel in HOST_KERNELS and device != "cuda":
        return f"on {device} rows are in the host's memory already; allow fused"
    if kernel in HOST_KERNELS and kept_gradient:
        return (
            "the optimizer steps on the rows itself, which needs them in the device's memory; "
            "allow fused"
        )
    return ""


def check_sequence_widths(
    tables: Collection[Table], constraints: Mapping[str, TableConstraints]
) -> None:
    """Raise PlanError where column-wise tables of one EmbeddingCollection would have shards of
    unequal width."""
    for collection in dict.fromkeys(table.collection for table in tables if not table.pooled):
        widths = {}
        for table in tables:
            table_constraints = constraints[table.full_name]
            if table.collection == collection and "column_wise" in table_constraints.sharding_types:
                min_partition = table_constraints.options.min_partition or 0
                widths[table.full_name] = min(min_partition, table.config.embedding_dim)
        if len(set(widths.values())) > 1:
            raise PlanError(
                f"tables of '{collection}' may be column_wise with unequal min_partition "
                f"({widths}), and torchrec needs one width for all of an EmbeddingCollection. Set "
                "the same min_partition for them, or leave column_wise out of their sharding_types."
            )


def torchrec_constraint(table: Table, constraints: TableConstraints) -> ParameterConstraints:
    """Return a table's constraints as torchrec takes them."""
    options = constraints.options
    features = table.config.feature_names
    factors = constraints.pooling_factors or [POOLING_FACTOR] * len(features)
    if options.pooling_factor is not None:
        factors = [options.pooling_factor] * len(features)
    share = options.cache_load_factor
    return ParameterConstraints(
        sharding_types=list(constraints.sharding_types),
        compute_kernels=list(constraints.compute_kernels),
        min_partition=options.min_partition,
        pooling_factors=list(factors),
        # Only an EmbeddingBagCollection has is_weighted; an EmbeddingCollection sums nothing that
        # weights could scale.
        is_weighted=bool(getattr(table.module, "is_weighted", lambda: False)()),
        cache_params=None if share is None else CacheParams(load_factor=share),
    )
