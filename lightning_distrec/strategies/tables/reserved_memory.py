"""How much of a rank's memory is kept for what is not tables: as said, or as the module and a batch need."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_distrec.sharding.planning.reservation import (
    VARIABLE,
    Reservation,
    chosen_reservation,
    is_measured,
    measured_reservation,
)
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.estimates.estimate import Job, dense_memory
from lightning_distrec.strategies.estimates.module_sizes import measure_module
from lightning_distrec.strategies.tables.decisions import TableSettings
from lightning_distrec.strategies.tables.sampled_step import sample_step
from lightning_distrec.strategies.tables.table_run import TableRun


def reserve(run: TableRun, tables: list[Table]) -> Reservation:
    """Collective. Return what is kept of every rank, as rank 0 is told, and as its environment says.

    Raises ConfigError, on all ranks: the environment says what cannot be.
    """
    trainer, module, settings, consensus = run.trainer, run.module, run.settings, run.consensus
    given, variable = consensus.all_gather((settings.planning.reserve, os.environ.get(VARIABLE, "")))[0]
    if not is_measured(given):
        return chosen_reservation(given, {VARIABLE: variable})
    activation_bytes, why = sample_step(trainer, module, tables, consensus, run.device)
    if why and trainer.state.fn == TrainerFn.FITTING:
        rank_zero_info(f"torchrec_sharded: reserve='measure': activations are not reserved for: {why}.")
    # Weighing runs the user's configure_model on a copy, so every rank does it: it may have collectives.
    weighed = consensus.all_or_none(
        "setup", lambda: weigh(trainer, module, settings, run.device, run.places, run.cuts_dense, activation_bytes)
    )
    return consensus.all_gather(weighed)[0]


def weigh(
    trainer: Any,
    module: LightningModule,
    settings: TableSettings,
    device: torch.device,
    places: NodeLayout,
    cuts_dense: bool,
    activation_bytes: int | None = None,
) -> Reservation:
    """Return what is kept where it is to be measured.

    trainer: or what has its settings and `precision`. activation_bytes: what a step keeps for its backward; None: no
    batch was looked at.
    """
    sizes = measure_module(module, trainer, device.type, settings.conversion)
    job = Job(num_ranks=places.num_ranks, num_nodes=places.num_nodes, memory_bytes=0, precision=str(trainer.precision))
    return measured_reservation(round(sum(dense_memory(sizes, job, cuts_dense).values())), activation_bytes)
