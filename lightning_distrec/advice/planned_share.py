"""What tables take of a rank and send in a step, by the plan that a fit would make."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lightning_distrec.advice.dry_job import DryJob, decisions_of, facts_of
from lightning_distrec.advice.dry_module import DryModule, dry_module
from lightning_distrec.errors import DistRecError
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.id_counts import MIN_FACTOR
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.traffic import IDS, ROW_GRADIENTS, ROWS
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.estimates.estimate import TablesShare
from lightning_distrec.strategies.estimates.module_sizes import Job
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.tables.plan_of_run import new_plan
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings


def planned_share(
    module: LightningModule, job: Job, trainer: Any, device_type: str, settings: TableSettings, profile: StepProfile
) -> tuple[TablesShare | None, str]:
    """Return what the fullest rank holds and what the busiest sends; or None and why there is no plan.

    Arguments as `advise`. Ids per example are those of the profile, where they were counted.
    """
    device = torch.device(device_type)
    settings = replace(settings, batch_size_per_rank=profile.batch_size or settings.batch_size_per_rank)
    dry_job = DryJob(
        num_nodes=job.num_nodes,
        ranks_on_node=job.num_ranks // job.num_nodes,
        device=device,
        memory_bytes=job.memory_bytes,
        memory_origin="advise",
    )
    like_trainer = SimpleNamespace(
        callbacks=trainer.callbacks,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        precision=job.precision,
    )
    try:
        dry = dry_module(module, like_trainer, settings, device)
        decisions = decisions_of(dry, dry_job)
        counted = {name: _counted(dry, name, of, profile) for name, of in decisions.constraints.items()}
        plan = new_plan(replace(decisions, constraints=counted), settings, facts_of(dry, dry_job))
    except DistRecError as error:
        return None, str(error).split(". ")[0]
    return _share(plan), ""


def _counted(dry: DryModule, name: str, constraints: TableConstraints, profile: StepProfile) -> TableConstraints:
    table = next(table for table in dry.selection.tables if table.full_name == name)
    factors = _factors(table, profile)
    return replace(constraints, pooling_factors=factors) if factors else constraints


def _factors(table: Table, profile: StepProfile) -> tuple[float, ...]:
    lookups, examples = profile.lookups.get(table.collection), profile.batch_size
    if lookups is None or not examples:
        return ()
    lengths = 0 if table.plain is not None else examples  # counted with the ids of a collection
    return tuple(max(MIN_FACTOR, (lookups.ids[name] - lengths) / examples) for name in table.config.feature_names)


def _share(plan: ShardingPlan) -> TablesShare:
    fullest, busiest = int(plan.memory.tables.argmax()), int(plan.traffic.sent().argmax())
    gradients = 0
    for table in plan.tables.values():
        if table.update == "dense":
            here = np.asarray(table.ranks) == fullest
            gradients += int((table.shard_rows * table.shard_columns)[here].sum()) * table.element_bytes
    rows, held = (int(plan.table_bytes(updates=updates)[fullest]) for updates in (False, True))
    return TablesShare(
        memory={
            "parameters": float(rows),
            "gradients": float(gradients),
            "optimizer state": float(max(0, held - rows - gradients)),
            "exchange": float(plan.memory.tables[fullest] - held),
        },
        sent={kind: float(plan.traffic.sent(kind)[busiest]) for kind in (IDS, ROWS, ROW_GRADIENTS)},
    )
