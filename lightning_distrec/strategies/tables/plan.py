"""How the tables of a run come to their plan: from a file, from an earlier run of the module, or from the planner."""

import os
from dataclasses import replace

from lightning.pytorch.trainer.states import TrainerFn

from lightning_distrec.sharding.plan_report.facts import PlanFacts
from lightning_distrec.sharding.plan_report.text import print_plan
from lightning_distrec.sharding.planning.device_placement import put_on_devices
from lightning_distrec.sharding.planning.held_memory import check_memory
from lightning_distrec.sharding.planning.kernels import cache_share
from lightning_distrec.sharding.planning.plan import constraints_of, plan_together
from lightning_distrec.sharding.planning.planned_tables import PlannedTable, UpdateCost, planned_tables
from lightning_distrec.sharding.planning.planner import MadePlan, cost_of_plan, make_plan
from lightning_distrec.sharding.planning.written_plan import ranks_per_node
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.decisions import Decisions, TableSettings
from lightning_distrec.strategies.tables.plan_files import follow, wanted_plan
from lightning_distrec.strategies.tables.table_run import TableRun


def plan_tables(
    run: TableRun, look: Decisions, old_plan: ShardingByTable, facts: ClusterFacts
) -> tuple[MadePlan, PlanFacts | None]:
    """Collective. Return the plan, and on rank 0 of a fit, which prints it, what reports tell of it.

    old_plan: of an earlier run of the module; {} for none. Raises PlanError, on all ranks: tables do not fit, or not
    where a file puts them.
    """
    trainer, settings = run.trainer, run.settings
    made = plan_together(lambda: plan_or_follow(look, old_plan, settings, facts))
    put_on_devices(made.plan, facts.devices)
    if not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
        return made, None
    told = facts_of_plan(look, settings, facts, made)
    print_plan(told, run.output_dtype, facts.in_words)
    return made, told


def plan_or_follow(
    look: Decisions, old_plan: ShardingByTable, settings: TableSettings, facts: ClusterFacts
) -> MadePlan:
    """Return the plan of a file that is named, or else the old one where it suits, or else a new one. On one rank.

    Raises PlanError, and of those InfeasiblePlanError where memory does not suffice.
    """
    plan = _given_plan(look, settings, facts) or _kept_plan(old_plan, look)
    return plan_anew(look, settings, facts) if plan is None else cost_of(look, plan, settings, facts)


def plan_anew(look: Decisions, settings: TableSettings, facts: ClusterFacts) -> MadePlan:
    """Return the planner's plan. Raises PlanError, and of those InfeasiblePlanError where memory does not suffice."""
    made = make_plan(look.tables, look.demands, facts.topology, settings.batch_size_per_rank)
    return _checked(look, made, facts)


def cost_of(look: Decisions, plan: ShardingByTable, settings: TableSettings, facts: ClusterFacts) -> MadePlan:
    """Return a plan that is there already, with its cost. Raises InfeasiblePlanError: a rank cannot hold its tables."""
    cost = cost_of_plan(look.tables, plan, look.demands, facts.topology, settings.batch_size_per_rank)
    return _checked(look, MadePlan(plan, cost), facts)


def _checked(look: Decisions, made: MadePlan, facts: ClusterFacts) -> MadePlan:
    check_memory(_planned(look, made, facts), facts.memory, facts.reservation)
    return made


def _planned(look: Decisions, made: MadePlan, facts: ClusterFacts) -> list[PlannedTable]:
    costs = {n: UpdateCost(u.kind, u.why, u.bytes_per_element, u.bytes_per_row) for n, u in look.updates.items()}
    constraints = constraints_of(look.tables, look.demands)
    pooling = {table.full_name: tuple(constraints[table.name].pooling_factors) for table in look.tables}
    return planned_tables(look.tables, made.plan, costs, facts.places.num_ranks, pooling)


def facts_of_plan(look: Decisions, settings: TableSettings, facts: ClusterFacts, made: MadePlan) -> PlanFacts:
    """Return what reports tell of a plan."""
    return PlanFacts(
        tables=_planned(look, made, facts),
        places=facts.places,
        batch_size=settings.batch_size_per_rank,
        comms=settings.comms,
        memory_bytes=facts.memory.device_bytes,
        usable_bytes=facts.memory.less(facts.reservation).device_bytes,
        on_gpu=facts.topology.compute_device == "cuda",
        cost=made.cost,
        origins=facts.origins,
    )


def _given_plan(look: Decisions, settings: TableSettings, facts: ClusterFacts) -> ShardingByTable | None:
    """Return the plan of the file that the user named; None for no file."""
    wanted = wanted_plan(settings.planning, os.environ)
    if wanted is None:
        return None
    device = facts.topology.compute_device
    return follow(*wanted, look, facts.places, device).as_plan(device, ranks_per_node(facts.places))


def _kept_plan(old: ShardingByTable, look: Decisions) -> ShardingByTable | None:
    """Return the earlier plan where it still suits every table, so that rows stay where they are."""
    if set(old) != {table.full_name for table in look.tables}:
        return None
    if any(old[name].sharding_type not in demand.sharding_types for name, demand in look.demands.items()):
        return None
    if any(old[name].compute_kernel not in demand.compute_kernels for name, demand in look.demands.items()):
        return None
    if any(cache_share(old[name]) != demand.options.cache_load_factor for name, demand in look.demands.items()):
        return None
    return {name: replace(sharding) for name, sharding in old.items()}
