"""Makes plans, and estimates plans from elsewhere. Runs on one rank, without exchanges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torchrec.distributed.planner import Topology

from lightning_distrec._compat.torchrec_modules import silence_torchrec
from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.sharding.planning.constraints import (
    TableConstraints,
    check_sequence_widths,
    torchrec_constraint,
)
from lightning_distrec.sharding.planning.costs import estimate_batch_ids
from lightning_distrec.sharding.planning.partial_plan import (
    InfeasiblePlan,
    MemoryBudget,
    PartialPlan,
    exceed_total_memory,
    no_option_fits,
    pack_by_memory,
)
from lightning_distrec.sharding.planning.planned_table import PlannedShard, PlannedTable
from lightning_distrec.sharding.planning.search import Search, Totals, proposals
from lightning_distrec.sharding.planning.sharding_options import (
    EstimatedOption,
    OptionEstimator,
    without_duplicates,
)
from lightning_distrec.sharding.planning.sharding_plan import (
    EXCHANGE_PARTS,
    TIME_PARTS,
    PlanCost,
    ShardingPlan,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table
from lightning_distrec.units import format_bytes


@dataclass(frozen=True)
class Planner:
    """Plans tables on ranks. Equal input gives equal plans."""

    tables: Sequence[Table]
    constraints: Mapping[str, TableConstraints]
    """By full name."""
    topology: Topology
    """Its memory is what tables and their exchange may take, without what is reserved."""
    batch_size: int

    def make_plan(self, seed: int = 0) -> ShardingPlan:
        """Return the plan that was found with the least time on a step.

        Raises InfeasiblePlanError: the tables do not fit. PlanError: options of tables contradict
        each other.
        """
        check_sequence_widths(self.tables, self.constraints)
        budget = self.budget
        options = []
        empty = PartialPlan([], budget)
        for number, table_options in enumerate(self.estimated_options()):
            choices = without_duplicates(table_options)
            options.append([choice for choice in choices if empty.find_ranks(choice) is not None])
            # A table that fits on no empty rank is reported by itself: the search could only find
            # that nothing fits.
            if not options[number]:
                raise self._error(no_option_fits(table_options, number, budget))
        totals = Totals(options, budget)
        starts = proposals(options, totals, budget)
        if not starts:
            # Proposals look for speed first. Where none fits, try a proof that no plan can, then
            # any plan at all.
            packed = exceed_total_memory(options, budget) or pack_by_memory(options, budget)
            if isinstance(packed, InfeasiblePlan):
                raise self._error(packed)
            starts = [packed]
        best = Search(options, seed).improve(starts, totals.lower_bound)
        placed = {}
        for number, table in enumerate(self.tables):
            option = best.option_of(number)
            ranks = best.ranks[number].tolist()
            placed[table.full_name] = PlannedTable.placed(
                table,
                sharding_type=option.sharding_type,
                compute_kernel=option.kernel,
                shards=tuple(map(PlannedShard, ranks, option.offsets, option.sizes)),
                cache_load_factor=option.cache_load_factor,
            )
        plan = ShardingPlan(
            layout=NodeLayout.equal(self.topology.world_size, self.topology.local_world_size),
            device=self.topology.compute_device,
            tables=placed,
            cost=replace(_cost(best), lower_bound=totals.lower_bound),
        )
        return self._with_times(plan, best)

    def estimate(self, plan: ShardingPlan) -> ShardingPlan:
        """Return a plan that was not searched for here, of a file or an earlier run, with its cost
        for these tables."""
        with silence_torchrec():
            estimator = self._estimator()
            options = [estimator.planned_option(t, plan.tables[t.full_name]) for t in self.tables]
        # `put` does not check memory: a plan that does not fit is estimated too, and `check_memory`
        # refuses it.
        on_ranks = PartialPlan([[option] for option in options], self.budget)
        for number, table in enumerate(self.tables):
            on_ranks.put(number, 0, np.asarray(plan.tables[table.full_name].ranks, dtype=np.intp))
        return self._with_times(replace(plan, cost=_cost(on_ranks)), on_ranks)

    def estimated_options(self) -> list[list[EstimatedOption]]:
        """Return all options of each table, in a fixed order."""
        with silence_torchrec():
            estimator = self._estimator()
            return list(map(estimator.options_of, self.tables))

    def describe(self, plan: ShardingPlan) -> ShardingPlan:
        """Return the plan with what a run knows of its tables, alike on every rank."""
        described = {}
        for table in self.tables:
            update = self.constraints[table.full_name]
            planned = plan.tables[table.full_name]
            constraint = torchrec_constraint(table, update)
            factors = constraint.pooling_factors
            numbers = [self.batch_size * factor for factor in factors]
            ids = estimate_batch_ids(numbers, table.config.num_embeddings, update.distinct_share)
            is_replicated = planned.sharding_type == "data_parallel"
            sends_rows = plan.num_ranks > 1 and not is_replicated and not table.pooled
            described[table.full_name] = replace(
                planned,
                collection=table.collection,
                pooled=table.pooled,
                weighted=bool(constraint.is_weighted),
                pooling_factors=tuple(factors),
                distinct_share=ids.distinct_share,
                deduplicated=sends_rows and ids.repeat_enough and table.mapping is None,
                update=update.update,
                optimizer=update.optimizer,
                update_reason=update.update_reason,
                update_bytes_per_element=update.bytes_per_element,
                update_bytes_per_row=update.bytes_per_row,
            )
        return replace(plan, tables=described, batch_size=self.batch_size)

    @property
    def budget(self) -> MemoryBudget:
        """What tables may take of every rank."""
        on_gpu = self.topology.compute_device == "cuda"
        device = []
        host = []
        for rank in self.topology.devices:
            # On CPU torchrec counts all memory as ddr, which is `device` here: it must not count
            # twice.
            device.append(rank.storage.hbm if on_gpu else rank.storage.ddr)
            host.append(rank.storage.ddr if on_gpu else 0)
        return MemoryBudget(
            np.array(device, dtype=np.int64),
            np.array(host, dtype=np.int64),
            self.topology.local_world_size,
        )

    def _estimator(self) -> OptionEstimator:
        return OptionEstimator(self.tables, self.constraints, self.topology, self.batch_size)

    def _with_times(self, plan: ShardingPlan, packed_tables: PartialPlan) -> ShardingPlan:
        """Return the plan with what runs and reports need to know of its tables."""
        plan = self.describe(plan)
        timed = {}
        for number, (name, planned) in enumerate(plan.tables.items()):
            option = packed_tables.option_of(number)
            updates = option.milliseconds_by_part[option.size_numbers, TIME_PARTS.index("update")]
            timed[name] = replace(planned, update_milliseconds=updates)
        return replace(plan, tables=timed)

    def _error(self, infeasible: InfeasiblePlan) -> InfeasiblePlanError:
        sizes = [table.parameter.numel() * table.parameter.element_size() for table in self.tables]
        usable = int(self.budget.device_bytes.min())
        proof = "no plan was found, which does not prove that there is none"
        if infeasible.proven:
            proof = "no plan can exist"
        return InfeasiblePlanError(
            f"the tables do not fit: table '{self.tables[infeasible.table].full_name}' "
            f"{infeasible.reason}. There are {len(sizes)} tables of {format_bytes(sum(sizes))}, "
            f"and {self.topology.world_size} ranks with at least {format_bytes(usable)} each for "
            "tables, what updates them and their exchange at "
            f"batch_size_per_rank={self.batch_size} (memory_bytes_per_rank less planning.reserve): "
            f"{proof}. Use more ranks, allow more sharding types for the table (sharding_types), "
            "or give more memory."
        )


def _cost(packed_tables: PartialPlan) -> PlanCost:
    """Return the time and the memory of every rank."""
    budget = packed_tables.budget
    parts = np.zeros((budget.num_ranks, len(TIME_PARTS)))
    for table, ranks in enumerate(packed_tables.ranks):
        option = packed_tables.option_of(table)
        # A rank may have several shards of a table, of which an indexed `+=` would count only the
        # last.
        np.add.at(parts, ranks, option.milliseconds_by_part[option.size_numbers])
    # On several nodes, ranks of a node wait for what all of them send.
    if packed_tables.num_links < budget.num_ranks:
        node_times = (
            parts[:, EXCHANGE_PARTS]
            .reshape(packed_tables.num_links, budget.ranks_on_node, -1)
            .sum(axis=1)
        )
        parts[:, EXCHANGE_PARTS] = node_times.repeat(budget.ranks_on_node, axis=0)
    return PlanCost(
        milliseconds=parts,
        device_bytes=budget.device_bytes - packed_tables.device_left,
        host_bytes=budget.host_bytes - packed_tables.host_left,
        device_bytes_usable=budget.device_bytes,
        host_bytes_usable=budget.host_bytes,
    )
