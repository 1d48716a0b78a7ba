"""What a table may be, and where each goes: rank 0 plans, every rank receives the plan or the error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.types import CacheParams

from lightning_distrec import errors
from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.sharding_types import KERNELS, POOLED_TYPES, SEQUENCE_TYPES, TWO_LEVEL_TYPES
from lightning_distrec.sharding.tables import Table

T = TypeVar("T")


@dataclass(frozen=True)
class TableConstraints:
    """What a table needs of its place."""

    sharding_types: tuple[str, ...]
    """Allowed ways to cut it."""
    kept_gradient: bool
    """Whether its gradient is kept and the user's own optimizer updates it, so that it must be in plain memory."""
    options: TableOptions
    bytes_per_element: float = 0.0
    """What its update keeps beside each element: a gradient, optimizer state."""
    bytes_per_row: float = 0.0
    """What its update keeps beside each row."""
    whole_rows_for: str = ""
    """The optimizer that keeps one number for a row, so that a row must stay on one rank; "" for none."""
    compute_kernels: tuple[str, ...] = KERNELS
    """Allowed kernels; those that are not possible are left out by torchrec."""
    pooling_factors: tuple[float, ...] | None = None
    """Ids per example of each of its features, as they were counted; None where nobody has."""


def default_types(num_nodes: int) -> tuple[str, ...]:
    """Return the ways to cut a table that are tried where the user names none.

    data_parallel is planned on request only: the table is then held whole by every rank. The two-level cuts need two
    levels: on one node they are row_wise and column_wise with more steps.
    """
    types = ("table_wise", "row_wise", "column_wise")
    return types if num_nodes == 1 else (*types, "table_row_wise", "table_column_wise")


def allowed_types(table: Table, options: TableOptions, places: NodeLayout, whole_rows_for: str) -> tuple[str, ...]:
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


def _why_not(table: Table, cut: str, places: NodeLayout, whole_rows_for: str) -> str:
    if not table.pooled and cut not in SEQUENCE_TYPES:
        return f"an EmbeddingCollection's table can be cut {', '.join(SEQUENCE_TYPES)}"
    if not places.alike and cut in TWO_LEVEL_TYPES:
        return (
            "the nodes have unequal numbers of ranks, or ranks that do not follow one another; allow table_wise, "
            "row_wise or column_wise"
        )
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


def check_sequence_widths(tables: list[Table], demands: Mapping[str, TableConstraints]) -> None:
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


def plan_together(make: Callable[[], T]) -> T:
    """Collective. Run `make` on rank 0; every rank returns what it made, or raises its error."""
    answer: list[T | tuple[str, str] | None] = [None]
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


def constraints_of(tables: list[Table], demands: Mapping[str, TableConstraints]) -> dict[str, ParameterConstraints]:
    """torchrec knows a constraint by the table's name alone: tables of one name get what suits them all."""
    constraints: dict[str, ParameterConstraints] = {}
    for table in tables:
        mine = _constraint(table, demands[table.full_name])
        earlier = constraints.get(table.name)
        constraints[table.name] = mine if earlier is None else _suiting_both(table, earlier, mine)
    return constraints


def _constraint(table: Table, demand: TableConstraints) -> ParameterConstraints:
    options, features = demand.options, table.config.feature_names
    factors = demand.pooling_factors or [POOLING_FACTOR] * len(features)
    if options.pooling_factor is not None:
        factors = [options.pooling_factor] * len(features)
    share = options.cache_load_factor
    return ParameterConstraints(
        sharding_types=list(demand.sharding_types),
        compute_kernels=list(demand.compute_kernels),
        min_partition=options.min_partition,
        pooling_factors=list(factors),
        batch_sizes=None if options.batch_size is None else [options.batch_size] * len(features),
        is_weighted=bool(getattr(table.module, "is_weighted", lambda: False)()),
        cache_params=None if share is None else CacheParams(load_factor=share),
    )


def _suiting_both(table: Table, one: ParameterConstraints, other: ParameterConstraints) -> ParameterConstraints:
    """Return what suits two tables of one name; of their loads the greater, and `other` is that of `table`."""
    types = [cut for cut in other.sharding_types or [] if cut in (one.sharding_types or [])]
    kernels = [kernel for kernel in other.compute_kernels or [] if kernel in (one.compute_kernels or [])]
    for what, left in (("way to cut", types), ("kernel", kernels), ("cache", one.cache_params == other.cache_params)):
        if not left:
            raise PlanError(
                f"table '{table.full_name}': another table is called '{table.name}' too, and no {what} suits both. "
                "Give the tables different names."
            )
    busier = max((one, other), key=lambda each: sum(each.pooling_factors))
    return replace(
        other,
        sharding_types=types,
        compute_kernels=kernels,
        pooling_factors=busier.pooling_factors,
        batch_sizes=busier.batch_sizes,
        is_weighted=one.is_weighted or other.is_weighted,
    )
