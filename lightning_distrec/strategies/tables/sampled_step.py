"""What a training step keeps for its backward, measured with one batch before tables are planned, without a trace."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.pipeline.peek import unchanged
from lightning_distrec.sharding.lookup.jagged import with_ids
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.estimates.first_batch import first_batch, moved
from lightning_distrec.strategies.estimates.meta_copy import without_trainer
from lightning_distrec.strategies.estimates.step_profile import profile_step


def sample_step(
    trainer: Trainer, module: LightningModule, tables: list[Table], consensus: Consensus, device: torch.device
) -> tuple[int | None, str]:
    """Collective. Return the most bytes that any rank keeps for its backward, or None and why that is not known.

    Every rank runs training_step and backward on a copy of the module, with the first batch of its first loader that
    can be looked at. Tables have one row there, which takes the place of all.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return None, "only fit trains"
    with unchanged(include_cuda=device.type == "cuda"):
        prepared = _prepared(trainer, module, tables, device)
        reasons = consensus.all_gather(prepared if isinstance(prepared, str) else "")
        # All or none: a training_step may exchange something among the ranks.
        if isinstance(prepared, str) or any(reasons):
            return None, _first(reasons)
        measured = profile_step(*prepared, None, str(trainer.precision))
    gathered = consensus.all_gather((measured.activation_bytes, "; ".join(measured.notes)))
    if why := _first([notes for _, notes in gathered]):
        return None, why
    return max(kept for kept, _ in gathered if kept is not None), ""


def _prepared(
    trainer: Trainer, module: LightningModule, tables: list[Table], device: torch.device
) -> tuple[LightningModule, Any] | str:
    """Return a copy of the module and a batch, on the device; or the reason why there are none, never empty."""
    try:
        batch, why = first_batch(trainer)
        if why:
            return why
        there = _with_small_tables(module, tables).to(device).train()
        return there, moved(trainer, there, batch, device)
    except Exception as error:  # of the user's loader or module; training meets it again, where it stops all ranks
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _with_small_tables(module: LightningModule, tables: list[Table]) -> LightningModule:
    """Return a copy of the module without its Trainer, in which every id finds the one row that its table has."""
    known = without_trainer(module)
    for table in tables:
        row = torch.zeros(1, table.config.embedding_dim, dtype=table.parameter.dtype)
        known[id(table.parameter)] = nn.Parameter(row, table.parameter.requires_grad)
    there = copy.deepcopy(module, known)
    for path in {table.collection for table in tables}:
        part = there.get_submodule(path)
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.padding_idx = None  # no row is padding: there is but one
        part.register_forward_pre_hook(_look_up_first_row, with_kwargs=True)
    return there


def _look_up_first_row(part: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    name = "features" if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else "input"
    if args:
        return (_of_first_row(args[0]), *args[1:]), options
    return args, options | {name: _of_first_row(options[name])}


def _of_first_row(ids: Tensor | KeyedJaggedTensor) -> Tensor | KeyedJaggedTensor:
    if isinstance(ids, Tensor):
        return torch.zeros_like(ids)
    return with_ids(ids, torch.zeros_like(ids.values()))


def _first(reasons: list[str]) -> str:
    """Return the reason of the first rank that has one, or ""."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
