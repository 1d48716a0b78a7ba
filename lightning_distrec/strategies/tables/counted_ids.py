"""Counts ids per example in the first training batches before tables are planned, and leaves all state unchanged."""

from contextlib import closing
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_distrec._compat.lightning import train_dataloaders
from lightning_distrec.prefetch.loaders import first_batches, loaders_in, peek_obstacle, unchanged
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.id_counts import IdCounts
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.tables.decisions import Decisions
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs
from lightning_distrec.units import describe_error

MAX_NAMED = 4
"""Number of tables that the message names."""


def with_counted_ids(inputs: SetUpInputs, decisions: Decisions) -> dict[str, TableConstraints]:
    """Collective. Return the tables' constraints by full name, with ids per example counted in batches of all ranks.

    Counts in `planning.estimate_pooling` batches of each training dataloader on each rank. A pooling_factor that the
    user set stays. A message names what cannot be counted; those tables are planned without counts.
    """
    counts, total, notes = IdCounts(), 0, []
    num_batches = inputs.settings.planning.estimate_pooling
    # Every rank takes part in the exchange below, also one that counts nothing.
    local = _count(inputs.trainer, inputs.module, num_batches, inputs.device) if num_batches else (counts, 0, [])
    for rank, (rank_counts, batches, rank_notes) in enumerate(inputs.consensus.all_gather(local)):
        counts.add(rank_counts)
        total += batches
        notes += [f"rank {rank}: {note}" for note in rank_notes]
    if total or notes:
        # Tables with a pooling_factor of the user's are planned with that: their counts are of no interest.
        unset = [t for t in decisions.tables if decisions.constraints[t.full_name].options.pooling_factor is None]
        _report(unset, counts, total, inputs.consensus.num_ranks, notes)
    return counts.add_to(decisions.constraints, decisions.tables)


def _count(
    trainer: Trainer, module: LightningModule, num_batches: int, device: torch.device
) -> tuple[IdCounts, int, list[str]]:
    """Return what this rank has counted, in how many batches, and what it could not read."""
    counts, total = IdCounts(), 0
    notes: list[str] = []
    declare = getattr(module, "sparse_inputs", None)
    try:
        with unchanged(include_cuda=device.type == "cuda"), torch.no_grad():
            for loader in loaders_in(train_dataloaders(trainer)):
                if reason := peek_obstacle(loader):
                    notes.append(reason)
                    continue
                # Closed within `unchanged`: the random generators of the
                # dataset are restored when this generator is closed.
                with closing(first_batches(loader, num_batches)) as batches:
                    for batch in batches:
                        counts.look_at(batch, *([] if declare is None else [declare(batch)]))
                        total += 1
    # No raise: the other ranks wait in the exchange that follows. A loader that fails here fails in training again,
    # where the error stops all ranks.
    except Exception as error:
        notes.append(describe_error(error))
    return counts, total, notes


def _report(tables: list[Table], counts: IdCounts, total: int, num_ranks: int, notes: list[str]) -> None:
    texts, unknown = [], []
    for table in tables:
        factors = counts.factors(table)
        if factors is None:
            unknown.append(table.full_name)
        else:
            texts.append(_in_words(table, factors))
    lines = []
    if texts:
        text = f"{'; '.join(texts[:MAX_NAMED])}{_more(texts)}"
        lines.append(f"ids per example, counted in {total} batches of {num_ranks} ranks: {text}")
    if unknown:
        lines.append(
            f"ids per example of {', '.join(unknown[:MAX_NAMED])}{_more(unknown)} are not known: no batch holds their "
            "features by name, nor does what sparse_inputs(batch) returns. Set pooling_factor where planning needs it"
        )
    if notes:
        lines.append(f"not read: {'; '.join(notes[:MAX_NAMED])}{_more(notes)}")
    rank_zero_info(f"torchrec_sharded: estimate_pooling: {'. '.join(lines)}.")


def _in_words(table: Table, factors: tuple[float, ...]) -> str:
    if table.plain is not None:
        return f"{table.full_name} {factors[0]:.2f}"
    features = zip(table.config.feature_names, factors, strict=True)
    return f"{table.full_name} {', '.join(f'{feature} {factor:.2f}' for feature, factor in features)}"


def _more(names: list[Any]) -> str:
    return f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
