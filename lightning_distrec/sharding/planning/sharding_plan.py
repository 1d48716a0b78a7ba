"""A plan: where each shard of each table is, what that costs, and what it was made for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from lightning_distrec.errors import PlanError
from lightning_distrec.sharding.planning.planned_table import PlannedTable
from lightning_distrec.sharding.planning.traffic import Traffic, estimate_traffic, replica_bytes
from lightning_distrec.sharding.sharders import (
    KERNELS,
    SHARDING_TYPES,
    QuantizedComms,
    ShardingByTable,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table

TIME_PARTS = (
    "forward compute",
    "forward exchange",
    "backward compute",
    "backward exchange",
    "prefetch",
    "exchange of ids",
    "update",
)
"""The parts of a step's time. Lookups are of torchrec's estimators; exchanges and updates are
estimated here.

torchrec's own total, and therefore its planner, leaves the ids out: over a slow link they may be
half of the bytes.
"""
EXCHANGE_PARTS = tuple(number for number, part in enumerate(TIME_PARTS) if "exchange" in part)
"""Numbers of those in which ranks wait for each other."""

Origin = tuple[str, str, str]
"""A quantity, its value, and where the value came from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanCost:
    """The estimates for one plan; empty where it was not estimated. Shapes: R is the number of
    ranks."""

    milliseconds: NDArray[np.float64]
    """(R, 7): time of a step that a rank spends on tables, by `TIME_PARTS`."""
    device_bytes: NDArray[np.int64]
    """(R,): memory of the rank's GPU that tables and their exchange take; on CPU, of its host."""
    host_bytes: NDArray[np.int64]
    """(R,): memory of the host that tables take which a GPU reads from there (fused_uvm kernels); 0
    on CPU."""
    device_bytes_usable: NDArray[np.int64]
    """(R,): device memory that tables may take, without what is reserved."""
    host_bytes_usable: NDArray[np.int64]
    """(R,): the same of the host's memory; 0 on CPU."""
    lower_bound: float | None = None
    """Milliseconds that no plan's critical path is below; None for a plan that was not searched
    for."""

    @property
    def known(self) -> bool:
        """Whether the plan was estimated."""
        return len(self.milliseconds) > 0

    @property
    def milliseconds_by_rank(self) -> NDArray[np.float64]:
        """(R,): all parts together."""
        total: NDArray[np.float64] = self.milliseconds.sum(axis=1)
        return total

    @property
    def slowest(self) -> int:
        """The rank that spends most time on tables."""
        return int(self.milliseconds_by_rank.argmax())

    def part(self, name: str) -> NDArray[np.float64]:
        """Return, (R,), the milliseconds of one of `TIME_PARTS`."""
        times: NDArray[np.float64] = self.milliseconds[:, TIME_PARTS.index(name)]
        return times

    @property
    def critical_path(self) -> float:
        """Milliseconds of a step for tables: each exchange waits for its slowest rank. Planning
        minimizes it."""
        exchanges = self.milliseconds[:, EXCHANGE_PARTS]
        # The sum that the search minimizes, see `PartialPlan.critical_path`.
        compute = self.milliseconds_by_rank - exchanges.sum(axis=1)
        return float(exchanges.max(axis=0, initial=0.0).sum() + compute.max(initial=0.0))


_NO_RANKS = np.zeros(0, dtype=np.int64)
# Shared as a default: it is frozen, and its arrays are empty.
NOT_ESTIMATED = PlanCost(
    milliseconds=np.zeros((0, len(TIME_PARTS))),
    device_bytes=_NO_RANKS,
    host_bytes=_NO_RANKS,
    device_bytes_usable=_NO_RANKS,
    host_bytes_usable=_NO_RANKS,
)


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """What tables take of one kind of memory. Shapes: R ranks."""

    tables: NDArray[np.int64]
    """(R,): bytes of tables, and of their exchange where the plan was estimated."""
    usable: NDArray[np.int64]
    """(R,): bytes that tables may take."""
    capacity: NDArray[np.int64]
    """(R,): all bytes; what is not usable is reserved."""

    @property
    def worst(self) -> int:
        """The rank with the fewest free bytes."""
        return int((self.usable - self.tables).argmin())

    @property
    def fits(self) -> bool:
        """Whether every rank has what it needs."""
        return bool((self.tables <= self.usable).all())


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Where each shard of each table is, what that costs, and what it was made for."""

    layout: NodeLayout
    """The ranks."""
    device: str
    """Type of the ranks' devices, cpu or cuda."""
    tables: Mapping[str, PlannedTable]
    """By full name."""
    cost: PlanCost = NOT_ESTIMATED

    # What it was made for: known in a run, and not in plan files.
    batch_size: int = 0
    """Examples per rank and step."""
    comms: QuantizedComms = field(default_factory=QuantizedComms)
    memory_bytes: int | Sequence[int] = 0
    """Memory of a rank, or of each: its GPU's, or its share of the host's where tables train on
    CPU."""
    usable_bytes: int | Sequence[int] = 0
    """How much of it tables may take, where `cost` is not known."""
    origins: Sequence[Origin] = ()
    dense_bytes: int = 0
    """What layers without tables keep on a rank: parameters, gradients, optimizer state."""
    sync_interval: int = 1
    """Steps from one synchronisation to the next, where `layout` has replicas."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.layout.num_ranks

    @property
    def on_gpu(self) -> bool:
        """Whether tables train on GPUs."""
        return self.device == "cuda"

    def for_torchrec(self, devices: Sequence[torch.device], first_rank: int = 0) -> ShardingByTable:
        """Return it as torchrec's sharders take it.

        devices: of each rank, as that rank names it.
        first_rank: of the group of ranks that it is for; a plan counts within the group, and
        shards' places do not.
        """
        # torchrec's own planner numbers a node's GPUs by rank. That is wrong where nodes are
        # unequal, or where a launcher shows each rank one GPU that all of them call cuda:0.
        names = list(map(str, devices))
        return {name: table.for_torchrec(names, first_rank) for name, table in self.tables.items()}

    @staticmethod
    def from_torchrec(
        tables: Iterable[Table],
        shardings: ShardingByTable,
        layout: NodeLayout,
        device: str,
        first_rank: int = 0,
    ) -> "ShardingPlan":
        """Return a plan of torchrec's for these tables; what it costs is not known."""
        planned = {}
        for table in tables:
            planned[table.full_name] = PlannedTable.from_torchrec(
                table, shardings[table.full_name], layout.num_ranks, first_rank
            )
        return ShardingPlan(layout=layout, device=device, tables=planned)

    @cached_property
    def traffic(self) -> Traffic:
        """What the ranks send in a training step."""
        return estimate_traffic(self.tables.values(), self.layout, self.batch_size, self.comms)

    @cached_property
    def replica_bytes(self) -> NDArray[np.float64]:
        """What each rank sends to other groups' in a step, (R,), in the mean over steps."""
        return replica_bytes(self.tables.values(), self.layout, self.batch_size, self.sync_interval)

    def table_bytes(self, on_host: bool = False, updates: bool = True) -> NDArray[np.int64]:
        """Return, (R,), bytes of rows, with `updates` of state and gradients too; of tables on the
        host or others."""
        totals = np.zeros(self.num_ranks)
        for table in self.tables.values():
            # A GPU's tables are in one of two memories, and each call sums up one of them.
            if table.on_host == on_host:
                totals += np.bincount(
                    table.ranks, table.shard_bytes(updates), minlength=self.num_ranks
                )
        return np.rint(totals).astype(np.int64)

    def memory_parts(self, on_host: bool = False) -> dict[str, NDArray[np.int64]]:
        """Return what tables take of a memory, as `memory` and `host_memory` sum it up: part ->
        (R,) bytes."""
        usage = self.host_memory if on_host else self.memory
        rows = self.table_bytes(on_host, updates=False)
        held = self.table_bytes(on_host)
        parts = {"rows": rows, "optimizer state and gradients": held - rows}
        if usage is not None:
            # Estimates are rounded shard by shard and sums only once, so that this may be below 0
            # by a few bytes.
            parts["exchange and cache"] = np.maximum(usage.tables - held, 0)
        return {part: part_bytes for part, part_bytes in parts.items() if part_bytes.any()}

    def start_bytes(self, full: bool) -> NDArray[np.int64]:
        """Return, (R,), bytes of the host that tables take at most while a rank starts.

        full: whether every rank builds full tables, in `__init__`, and not on meta. They are freed
        before shards are made, but for rank 0's, whose rows fill all shards.
        """
        shards = self.table_bytes(on_host=self.on_gpu)
        if not full:
            return shards
        tables = sum(table.num_bytes for table in self.tables.values())
        return np.where(np.arange(len(shards)) == 0, tables + shards, np.maximum(tables, shards))

    @cached_property
    def memory(self) -> RankUsage:
        """The memory that tables are in: the GPU's, or the host's where they train on CPU."""
        # One number is for all ranks: broadcasting makes (R,) of it, without a copy.
        capacity = np.broadcast_to(np.asarray(self.memory_bytes, dtype=np.int64), self.num_ranks)
        if self.cost.known:
            usable = np.minimum(self.cost.device_bytes_usable, capacity)
            return RankUsage(tables=self.cost.device_bytes, usable=usable, capacity=capacity)
        usable = np.broadcast_to(np.asarray(self.usable_bytes, dtype=np.int64), self.num_ranks)
        return RankUsage(tables=self.table_bytes(), usable=usable, capacity=capacity)

    @cached_property
    def host_memory(self) -> RankUsage | None:
        """The host's memory, for tables that a GPU reads from there; None without such tables."""
        if self.cost.known:
            tables = self.cost.host_bytes
            usable = self.cost.host_bytes_usable
        else:  # only the planner knows how much the host has
            tables = usable = self.table_bytes(on_host=True)
        return RankUsage(tables=tables, usable=usable, capacity=usable) if tables.any() else None

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs."""
        return self.memory.fits and (self.host_memory is None or self.host_memory.fits)


def plan_from_torchrec(
    plan: TorchRecPlan, tables: Sequence[Table], layout: NodeLayout, device: str
) -> ShardingPlan:
    """Return TorchRec's plan for the tables of this module, whose collections may have longer or
    shorter paths there.

    Raises PlanError: a collection is not in the plan, or several may be meant; a sharding type or
    kernel is not ours.
    """
    planned: dict[str, PlannedTable] = {}
    num_ranks = layout.num_ranks
    for path in dict.fromkeys(table.collection for table in tables):
        keys = [key for key in plan.plan if _is_end(key, path) or _is_end(path, key)]
        if len(keys) != 1:
            raise PlanError(
                f"plan_file=ShardingPlan(...): '{path}' fits {keys or 'none'} of its modules "
                f"{list(plan.plan)}. Make the plan for the LightningModule, or for the module of "
                "it that holds the collections."
            )
        shardings: Mapping[str, Any] = plan.plan[keys[0]]  # type: ignore[assignment]
        for table in tables:
            if table.collection == path and table.name in shardings:
                entry = planned[table.full_name] = _planned(
                    table, shardings[table.name], layout.num_ranks
                )
                num_ranks = max(num_ranks, *(1 + shard.rank for shard in entry.shards))
    # TorchRec's plan does not say for how many ranks it is; `plan_for_run` compares.
    return ShardingPlan(
        layout=NodeLayout.equal(num_ranks, num_ranks), device=device, tables=planned
    )


def _planned(table: Table, sharding: ParameterSharding, num_ranks: int) -> PlannedTable:
    planned = PlannedTable.from_torchrec(table, sharding, num_ranks)
    if planned.compute_kernel == "dense" and planned.sharding_type != "data_parallel":
        # TorchRec plans it for all tables on CPU; whether an update is fused, our optimizers
        # decide.
        planned = replace(planned, compute_kernel="fused")
    if planned.sharding_type not in SHARDING_TYPES or planned.compute_kernel not in KERNELS:
        raise PlanError(
            f"plan_file=ShardingPlan(...): table '{table.full_name}' is {planned.sharding_type} "
            f"with the kernel {planned.compute_kernel}. Use one of {', '.join(SHARDING_TYPES)}, "
            f"and one of {', '.join(KERNELS)}."
        )
    return planned


def _is_end(end: str, path: str) -> bool:
    return f".{path}".endswith(f".{end}" if end else "")
