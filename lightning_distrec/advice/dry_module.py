"""A module on the meta device: decisions about its tables that need no ranks, and what its batches look up."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.translation import UNKNOWN_TENSORS, TableUpdate
from lightning_distrec.prefetch.peek import first_batches, loaders_in, peek_obstacle
from lightning_distrec.sharding.planning.id_counts import IdCounts
from lightning_distrec.sharding.tables import tables_on_meta
from lightning_distrec.strategies.estimates.module_sizes import configured_optimizers, meta_copy
from lightning_distrec.strategies.tables.decisions import SelectedTables, select_tables, updates_in_fit
from lightning_distrec.strategies.tables.replicas import why_kept
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings
from lightning_distrec.units import describe_error, shortened


@dataclass(frozen=True, kw_only=True)
class DryModule:
    """A module on the meta device, and the decisions about its tables that do not depend on ranks."""

    module: LightningModule
    """Configured, on the meta device."""
    selection: SelectedTables
    updates: dict[str, TableUpdate]
    optimizers: list[Optimizer]
    """Those of configure_optimizers, on the meta device; none where it failed."""
    trainer: Any
    """Stands for a Trainer: has the attributes that decisions need."""
    settings: TableSettings
    assumed: list[str]
    """Assumptions, for the report."""
    counts: IdCounts | None = None
    """Ids in batches, where some were looked at."""


def dry_module(module: LightningModule, trainer: Any, settings: TableSettings, device: torch.device) -> DryModule:
    """Inspect a module that was built on the meta device, without changing it.

    trainer: has callbacks, precision, accumulate_grad_batches and gradient_clip_val, as a Trainer would.
    Raises ConfigError: configure_model cannot run without memory, or without a Trainer; there are no tables. And the
    strategy's own errors.
    """
    precision = trainer.precision
    try:
        # As Lightning calls configure_model, but with tables on meta. The random state stays, so that a fit after this
        # draws the same.
        with tables_on_meta(), default_type(precision), torch.random.fork_rng(devices=[]):
            copied = meta_copy(module)
    except Exception as error:
        raise ConfigError(
            f"plan: configure_model of {type(module).__name__} cannot run on the meta device without a Trainer "
            f"({locate_error(error)}{describe_error(error)}). Build there what needs neither, and "
            "tensors whose values are read with device='cpu'."
        ) from error
    selection = select_tables(copied, settings)
    if not selection.tables:
        unsharded = "".join(
            f" '{path}' is not sharded: {reason}." for path, reason in list(selection.left_alone.items())[:3]
        )
        raise ConfigError(
            f"plan: nothing to plan: {type(module).__name__} has no embedding tables that torchrec_sharded would "
            f"shard.{unsharded} See convert_embeddings and min_rows, or train it with another strategy."
        )
    assumed = list(selection.warnings)
    # Decisions only ask whether losses are scaled. On a CPU Lightning takes bf16-mixed instead, which has no scaler.
    plugin = SimpleNamespace(scaler=object() if precision == "16-mixed" and device.type == "cuda" else None)
    optimizers: list[Optimizer] = []
    failed = ""
    try:
        # It may read self.trainer, as for estimated_stepping_batches. A plan by assumed updates is better than none.
        optimizers = configured_optimizers(copied)
    except Exception as error:
        failed = describe_error(error)
    kept_for = why_kept(settings.groups)
    updates, table_optimizers, notes = updates_in_fit(
        selection, copied, optimizers, trainer, plugin, device, {}, kept_for
    )
    assumed += notes
    optimized_tables = {name for optimizer in table_optimizers for name in optimizer.tables}
    module_tables = [table for table in selection.tables if table.full_name not in optimized_tables]
    if failed and module_tables:
        assumed.append(
            f"configure_optimizers failed without a Trainer ({failed}): the user's optimizer is assumed to update "
            f"every table on its rank, with {UNKNOWN_TENSORS} elements of state for each of its own, as Adam"
        )
        updates |= {table.full_name: _assumed(table.parameter) for table in module_tables}
    return DryModule(
        module=copied,
        selection=selection,
        updates=updates,
        optimizers=optimizers,
        trainer=trainer,
        settings=settings,
        assumed=assumed,
    )


def _assumed(parameter: torch.Tensor) -> TableUpdate:
    if not parameter.requires_grad:
        return TableUpdate("frozen", "requires_grad=False")
    return TableUpdate("sparse", "assumed", bytes_per_element=float(UNKNOWN_TENSORS * parameter.element_size()))


def default_type(precision: str) -> Any:
    """Return the context in which Lightning calls configure_model at this precision."""
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision).module_init_context()  # type: ignore[arg-type]
    return DoublePrecision().module_init_context() if precision == "64-true" else nullcontext()


def locate_error(error: BaseException) -> str:
    """Return which module's code raised, as "Scale.__init__, model.py:12: "; "" if none did."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        # The innermost frame in a module's method that is not torch's or Lightning's: the user's line.
        frame = trace.tb_frame
        module = frame.f_locals.get("self")
        code_of = str(frame.f_globals.get("__name__", ""))
        if isinstance(module, torch.nn.Module) and not code_of.startswith(("torch.", "lightning.")):
            file = os.path.basename(frame.f_code.co_filename)
            place = f"{type(module).__name__}.{frame.f_code.co_name}, {file}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return place


def count_ids_in_data(module: Any, data: Any, num_batches: int) -> tuple[IdCounts, int | None]:
    """Return the ids in the first batches of each training dataloader, as one rank draws them; and its batch size.

    module, data: as the YAML describes them; hooks run as `fit` runs them on one rank. What a module computes of a
    batch is seen where it has `sparse_inputs`. Raises ConfigError: there is no data, or it fails.
    """
    counts, total, batch_size = IdCounts(), 0, None
    declare = getattr(module, "sparse_inputs", None)
    try:
        for loader in loaders_in(_loaders(module, data)):
            # first_batches starts no workers for a few batches; what is no DataLoader is just iterated.
            batches = (
                first_batches(loader, num_batches) if not peek_obstacle(loader) else islice(iter(loader), num_batches)
            )
            for batch in batches:
                parts = [batch] if declare is None else [batch, declare(batch)]
                counts.look_at(*parts)
                batch_size, total = batch_size or _num_examples(parts), total + 1
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--from-data: the data cannot be read ({describe_error(error)}). "
            "It is built as for fit, but without a Trainer; plan without --from-data, or set pooling_factor."
        ) from error
    if not total:
        raise ConfigError("--from-data: the training dataloader has no batch.")
    return counts, batch_size


def _num_examples(parts: list[Any]) -> int | None:
    for part in parts:
        # New counts, since those of all batches add the examples up.
        counts = IdCounts()
        counts.look_at(part)
        for count in (*counts.features.values(), *counts.tensors.values()):
            return count.examples
    return None


def _loaders(module: Any, data: Any) -> Any:
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    if not is_overridden("train_dataloader", module):
        raise ConfigError("--from-data: the YAML has no data, and its module no train_dataloader.")
    return module.train_dataloader()


MAX_NAMED = 4
"""Number of tables that a message names."""


def with_counts(dry: DryModule, counts: IdCounts, batch_size: int | None) -> DryModule:
    """Return the module with ids in batches, for estimates; options that are set stay."""
    settings, assumed = dry.settings, list(dry.assumed)
    if settings.batch_size_per_rank is None and batch_size:
        settings = replace(settings, batch_size_per_rank=batch_size, batch_size_origin="of the first batch")
    unknown = [table.full_name for table in dry.selection.tables if counts.factors(table) is None]
    if unknown:
        assumed.append(
            f"--from-data: no batch holds the features of {shortened(unknown, MAX_NAMED)} by name, nor does what "
            "sparse_inputs(batch) returns"
        )
    return replace(dry, counts=counts, settings=settings, assumed=assumed)
