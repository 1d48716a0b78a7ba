"""The plan of a run: from a file, from an earlier run of the module or from the planner; printed
and saved.

Before that, ids per example may be counted in the first training batches, which leaves all state
unchanged.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from lightning_distrec._compat.lightning import train_dataloaders
from lightning_distrec._compat.lightning_checkpoints import resumed_path
from lightning_distrec.checkpoint.single_file import read_plan
from lightning_distrec.errors import ConfigError
from lightning_distrec.prefetch.loaders import first_batches, loaders_in, peek_obstacle, unchanged
from lightning_distrec.sharding.planning.checks import check_memory, plan_for_run
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.id_counts import IdCounts
from lightning_distrec.sharding.planning.plan_file import (
    PLAN_FILE,
    load_plan,
    save_plan,
)
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.report_text import print_plan
from lightning_distrec.sharding.planning.sharding_plan import (
    NOT_ESTIMATED,
    ShardingPlan,
    plan_from_torchrec,
)
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.strategies.tables.cluster_facts import ClusterFacts
from lightning_distrec.strategies.tables.set_up_inputs import Decisions, SetUpInputs, TableSettings
from lightning_distrec.units import describe_error, shortened

MAX_NAMED = 4
"""Number of notes in a message."""


def with_counted_ids(inputs: SetUpInputs, decisions: Decisions) -> dict[str, TableConstraints]:
    """Collective. Return the tables' constraints by full name, with ids per example counted in
    batches of all ranks.

    Counts in `planning.estimate_pooling` batches of each training dataloader on each rank. A
    pooling_factor that the user set stays. The start table names what cannot be counted.
    """
    counts = IdCounts()
    total = 0
    notes = []
    num_batches = inputs.settings.planning.estimate_pooling
    # Every rank takes part in the exchange below, also one that counts nothing.
    local = (
        _count(inputs.trainer, inputs.module, num_batches, inputs.device)
        if num_batches
        else (counts, 0, [])
    )
    for rank, (rank_counts, batches, rank_notes) in enumerate(inputs.consensus.all_gather(local)):
        counts.add(rank_counts)
        total += batches
        notes += [f"rank {rank}: {note}" for note in rank_notes]
    if total or notes:
        text = f"ids are counted in {total} batches of {inputs.consensus.num_ranks} ranks"
        if notes:
            text += f". not read: {shortened(notes, MAX_NAMED, '; ')}"
        rank_zero_info(f"torchrec_sharded: estimate_pooling: {text}.")
    return counts.add_to(decisions.constraints, decisions.tables)


def _count(
    trainer: Trainer, module: LightningModule, num_batches: int, device: torch.device
) -> tuple[IdCounts, int, list[str]]:
    """Return what this rank has counted, in how many batches, and what it could not read."""
    counts = IdCounts()
    total = 0
    notes: list[str] = []
    declare = getattr(module, "sparse_inputs", None)
    try:
        with unchanged(include_cuda=device.type == "cuda"), torch.no_grad():
            for loader in loaders_in(train_dataloaders(trainer)):
                reason = peek_obstacle(loader)
                if reason:
                    notes.append(reason)
                    continue
                # Closed within `unchanged`: the random generators of the dataset are restored when
                # this generator is closed.
                with closing(first_batches(loader, num_batches)) as batches:
                    for batch in batches:
                        counts.look_at(batch, *([] if declare is None else [declare(batch)]))
                        total += 1
    # No raise: the other ranks wait in the exchange that follows. A loader that fails here fails in
    # training again, where the error stops all ranks.
    except Exception as error:
        notes.append(describe_error(error))
    return counts, total, notes


OF_CHECKPOINT = "FORCE_LOAD_SHARDING_PLAN"
"""1: a fit follows the plan in the checkpoint that it resumes from, as in TorchEasyRec."""


def plan_tables(
    inputs: SetUpInputs, decisions: Decisions, earlier: ShardedTables | None, facts: ClusterFacts
) -> ShardingPlan:
    """Collective. Return the plan, with its cost; rank 0 of a fit prints it.

    earlier: the tables of an earlier run of the module. Raises PlanError, on all ranks: tables do
    not fit, or cannot be sharded as in a file.
    """
    consensus = inputs.consensus

    def make() -> ShardingPlan | None:
        return _make_plan(inputs, decisions, earlier, facts) if consensus.rank == 0 else None

    # Rank 0's on all ranks: what it says of repeated ids must be alike on ranks with other batches.
    sent: list[Any] = [consensus.all_or_none("planning", make)]
    if consensus.num_ranks > 1:
        dist.broadcast_object_list(sent, src=0, group=consensus.group)
    plan: ShardingPlan = sent[0]
    if consensus.rank == 0 and inputs.fits:
        notes = [facts.in_words, *decisions.shipped]
        estimated = plan
        assumed = decisions.with_assumed_ids
        if assumed and plan.num_ranks > 1:
            estimated = replace(plan, batch_size=0, cost=NOT_ESTIMATED)
            notes.append(
                f"Planned with one id per example, assumed, of {shortened(assumed, MAX_NAMED)} "
                "(planning.estimate_pooling counts ids, by features' names); the first step shows "
                "what is sent"
            )
        print_plan(estimated, inputs.output_dtype, "\n".join(notes), decisions.left_alone)
    return plan


def _make_plan(
    inputs: SetUpInputs, decisions: Decisions, earlier: ShardedTables | None, facts: ClusterFacts
) -> ShardingPlan:
    old = None
    resumes_from = None
    settings = inputs.settings
    # A plan of other groups names ranks that are in another group now.
    if earlier is not None and earlier.groups.size == inputs.groups.size:
        old = plan_of(earlier, inputs)
    if inputs.fits and settings.planning.plan_file is None and follows_checkpoint():
        resumes_from = resumed_path(inputs.trainer)
    if resumes_from is not None:
        saved = load_plan(resumes_from, read_plan)
        if saved.num_ranks == facts.layout.num_ranks:
            planning = replace(settings.planning, plan_file=resumes_from)
            settings = replace(settings, planning=planning)
        else:
            kept = keep_sharding_types(decisions.constraints, saved)
            decisions = decisions.with_constraints(kept)
            rank_zero_info(
                f"Tables keep the sharding types of {resumes_from}, for {saved.num_ranks} ranks."
            )
    return plan_or_follow(decisions, old, settings, facts)


def plan_of(sharded: ShardedTables, inputs: SetUpInputs) -> ShardingPlan:
    """Return the plan of tables that are sharded already, without its cost."""
    groups = sharded.groups
    layout = inputs.layout.group_layout(groups.size)
    return ShardingPlan.from_torchrec(
        sharded.tables, sharded.plan, layout, inputs.device.type, groups.first_rank
    )


def plan_or_follow(
    decisions: Decisions, old: ShardingPlan | None, settings: TableSettings, facts: ClusterFacts
) -> ShardingPlan:
    """Return the plan of a file that is named, or else the old one where it suits, or else a new
    one. On one rank.

    Raises PlanError, and of those InfeasiblePlanError where memory does not suffice.
    """
    if settings.planning.plan_file is not None:
        return cost_of(
            decisions, follow(settings.planning.plan_file, decisions, facts), settings, facts
        )
    if old is not None and _still_suits(old, decisions):
        return cost_of(decisions, old, settings, facts)
    return new_plan(decisions, settings, facts)


def new_plan(decisions: Decisions, settings: TableSettings, facts: ClusterFacts) -> ShardingPlan:
    """Return the planner's plan.

    Raises PlanError, and of those InfeasiblePlanError where memory does not suffice.
    """
    planner = _planner(decisions, facts, settings.batch_size)
    return _for_run(planner.make_plan(), settings, facts)


def cost_of(
    decisions: Decisions, plan: ShardingPlan, settings: TableSettings, facts: ClusterFacts
) -> ShardingPlan:
    """Return an existing plan with its cost in this run.

    Raises InfeasiblePlanError: a rank cannot hold its tables.
    """
    planner = _planner(decisions, facts, settings.batch_size)
    return _for_run(planner.estimate(plan), settings, facts)


def _planner(decisions: Decisions, facts: ClusterFacts, batch_size: int) -> Planner:
    return Planner(decisions.tables, decisions.constraints, facts.topology, batch_size)


def _for_run(plan: ShardingPlan, settings: TableSettings, facts: ClusterFacts) -> ShardingPlan:
    """Return the plan with what reports need to know of the run."""
    check_memory(plan, facts.memory, facts.reservation)
    return replace(
        plan,
        layout=facts.layout,
        comms=settings.comms,
        memory_bytes=facts.memory.device_bytes,
        usable_bytes=facts.memory.less(facts.reservation).device_bytes,
        origins=facts.origins,
        dense_bytes=facts.dense_bytes,
        sync_interval=settings.groups.sync_interval,
    )


def _still_suits(old: ShardingPlan, decisions: Decisions) -> bool:
    """Return whether an earlier plan suits every table, so that rows can stay where they are."""
    constraints = decisions.constraints
    if old.tables.keys() != constraints.keys():
        return False
    for name, table in old.tables.items():
        allowed = constraints[name]
        has_type = table.sharding_type in allowed.sharding_types
        has_kernel = table.compute_kernel in allowed.compute_kernels
        has_cache = table.cache_load_factor == allowed.options.cache_load_factor
        if not (has_type and has_kernel and has_cache):
            return False
    return True


# --------------------------------------------------------------------------------------- plan files


def follows_checkpoint() -> bool:
    """Whether the environment asks for the plan of the checkpoint that a fit resumes from. Raises
    ConfigError."""
    value = os.environ.get(OF_CHECKPOINT, "").strip() or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{OF_CHECKPOINT}={value}: set 1 to follow the plan of ckpt_path, or 0.")
    return value == "1"


def keep_sharding_types(
    constraints: Mapping[str, TableConstraints], plan: ShardingPlan
) -> dict[str, TableConstraints]:
    """Return constraints that leave each table its sharding type in a plan for another number of
    ranks.

    A type that the user's options or these ranks do not allow is planned again.
    Source: TorchEasyRec, tzrec/utils/plan_util.py, create_planner.
    """
    kept = dict(constraints)
    for name, table in plan.tables.items():
        if name in kept and table.sharding_type in kept[name].sharding_types:
            kept[name] = replace(kept[name], sharding_types=(table.sharding_type,))
    return kept


def follow(source: str | TorchRecPlan, decisions: Decisions, facts: ClusterFacts) -> ShardingPlan:
    """Return the plan in a file, or TorchRec's, for this run's tables and ranks. Call it on one
    rank.

    Raises ConfigError, PlanError: see `load_plan`, `plan_from_torchrec` and `plan_for_run`.
    """
    device = facts.topology.compute_device
    if isinstance(source, str):
        plan = load_plan(source, read_plan)
        description = f"plan_file='{source}'"
    else:
        plan = plan_from_torchrec(source, decisions.tables, facts.layout, device)
        description = "plan_file=ShardingPlan(...)"
    plan = plan_for_run(
        plan,
        description,
        decisions.tables,
        constraints=decisions.constraints,
        layout=facts.layout,
        device=device,
    )
    rank_zero_info(f"Tables are sharded by the plan of {description}.")
    return plan


def save_with_logs(trainer: Trainer, plan: ShardingPlan) -> None:
    """Write the plan into the folder of the first logger that has one, on rank 0; warn where that
    fails."""
    folder = next(filter(None, map(folder_of, trainer.loggers)), None)
    trial = trainer.fast_dev_run  # type: ignore[attr-defined]
    if trial or not trainer.is_global_zero or folder is None:
        return
    try:
        save_plan(folder / PLAN_FILE, plan)
    except OSError as error:
        rank_zero_warn(
            f"the plan is not saved: {folder / PLAN_FILE} cannot be written "
            f"({error.strerror or error}). Training continues."
        )


def folder_of(logger: Logger) -> Path | None:
    """Return the folder of one run: that of its logs, or the one above its checkpoints; None for a
    logger without."""
    log_dir = getattr(logger, "log_dir", None)
    if isinstance(log_dir, str):  # Lightning's dummy loggers have a function for any name
        return Path(log_dir)
    if logger.save_dir is None or logger.name is None or logger.version is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir) / logger.name / version
