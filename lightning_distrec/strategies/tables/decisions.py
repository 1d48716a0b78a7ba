"""What is decided about each table while the module is still unsharded: its update, its places, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_distrec._compat.lightning import init_optimizers_and_schedulers
from lightning_distrec.errors import ConfigError, ShardingError
from lightning_distrec.optimizers.loss_weight import LossReduction, check_loss_reduction
from lightning_distrec.optimizers.translation import TableUpdate, frozen, translate
from lightning_distrec.optimizers.updates_in_backward import (
    hooks_without_gradients,
    refuse_what_is_not_exact,
    why_not_in_backward,
)
from lightning_distrec.sharding.lookup.ids_check import CheckIds, check_check_ids
from lightning_distrec.sharding.plain_embeddings import NO_CONVERSION, Conversion
from lightning_distrec.sharding.planning.kernels import allowed_kernels, refuse_other_storage
from lightning_distrec.sharding.planning.named_options import left_whole, options_by_table
from lightning_distrec.sharding.planning.plan import TableConstraints, allowed_types
from lightning_distrec.sharding.planning.planning_options import PlanningOptions
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.tables import Table, find_tables


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """What the strategy was told about tables."""

    everywhere: TableOptions
    conversion: Conversion
    by_table: Mapping[str, Any]
    check_ids: CheckIds
    comms: QuantizedComms
    loss_reduction: LossReduction
    memory_bytes_per_rank: int | None
    batch_size_per_rank: int
    planning: PlanningOptions

    def __post_init__(self) -> None:
        check_check_ids(self.check_ids)
        check_loss_reduction(self.loss_reduction)
        if self.batch_size_per_rank <= 0:
            raise ConfigError(f"batch_size_per_rank={self.batch_size_per_rank}: must be above 0.")


@dataclass(frozen=True)
class Decisions:
    """What was found in an unsharded module, and what is to become of it."""

    tables: list[Table]
    warnings: list[str]
    updates: dict[str, TableUpdate]
    demands: dict[str, TableConstraints]
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[Any]


@dataclass(frozen=True)
class WantedTables:
    """The tables of a module that are to be sharded, and what was said about each."""

    tables: list[Table]
    options: dict[str, TableOptions]
    """By full name."""
    left_alone: dict[str, str]
    """Path -> reason, of modules that hold tables and are not sharded."""
    kept_whole: set[str]
    """Collections that are ordinary layers, because the user wants every rank to have them."""

    @property
    def warnings(self) -> list[str]:
        """What is not sharded although it might seem so."""
        return [f"'{path}' is left alone, whole on every rank: {why}." for path, why in self.left_alone.items()]


def wanted_tables(module: nn.Module, settings: TableSettings) -> WantedTables:
    """Return the tables of an unsharded module that are to be sharded. Raises ConfigError, ShardingError."""
    found = find_tables(module, settings.conversion)
    options = options_by_table(found.tables, settings.everywhere, settings.by_table)
    kept = left_whole(found.tables, settings.by_table)
    tables = [table for table in found.tables if table.collection not in kept]
    of_tables = {table.full_name: _in_collection(options[table.full_name]) for table in tables}
    return WantedTables(tables, of_tables, found.left_alone, kept)


def updates_in_fit(
    wanted: WantedTables,
    module: LightningModule,
    optimizers: list[Optimizer],
    trainer: Any,
    precision: Any,
    device: torch.device,
    earlier: Mapping[str, list[nn.Parameter]],
) -> tuple[dict[str, TableUpdate], list[str]]:
    """Return what updates each table in a fit, by full name, and warnings.

    trainer: or what has its callbacks, precision, accumulate_grad_batches and gradient_clip_val. precision: its plugin,
    or what has the plugin's scaler. earlier: see `decide`. Raises OptimizerError, UnsupportedError.
    """
    tables = wanted.tables
    updates = translate(
        {table.full_name: table.parameter for table in tables},
        {name: _mode(name, option) for name, option in wanted.options.items()},
        optimizers,
        device.type,
        why_not_in_backward(trainer, module, precision),
        {table.full_name for table in tables if table.plain is not None},
        earlier,
    )
    kinds = {name: update.kind for name, update in updates.items()}
    refuse_what_is_not_exact(trainer, module, precision, kinds, len(optimizers))
    fused = [name for name, update in updates.items() if update.in_backward]
    hooks = hooks_without_gradients(trainer, module, fused)
    return updates, [*_warn_of_half_precision(tables, fused), *filter(None, [hooks])]


def demands_of(
    wanted: WantedTables, updates: Mapping[str, TableUpdate], device: torch.device, places: NodeLayout
) -> dict[str, TableConstraints]:
    """Return what each table needs of its place, by full name. Raises ConfigError, PlanError: it cannot have that."""
    return {
        name: _demand(table, wanted.options[name], updates[name], device, places)
        for table in wanted.tables
        for name in [table.full_name]
    }


def decide(
    trainer: Trainer,
    module: LightningModule,
    settings: TableSettings,
    device: torch.device,
    places: NodeLayout,
    earlier: Mapping[str, list[nn.Parameter]],
) -> Decisions:
    """Look at the unsharded module on this rank, without any exchange between ranks.

    earlier: full name -> the shards of an earlier run of the module.
    For fit, configure_optimizers runs, and its updates are translated. Raises what is refused: see docs.
    """
    wanted = wanted_tables(module, settings)
    tables = wanted.tables
    _refuse_dense_on_meta(module, tables, wanted.left_alone | dict.fromkeys(wanted.kept_whole, "keep_whole=True"))
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    updates = {table.full_name: frozen("evaluation only") for table in tables}
    warnings = wanted.warnings
    if tables and trainer.state.fn == TrainerFn.FITTING:
        optimizers, schedulers = init_optimizers_and_schedulers(module)
        updates, more = updates_in_fit(wanted, module, optimizers, trainer, trainer.precision_plugin, device, earlier)
        warnings += more
    return Decisions(tables, warnings, updates, demands_of(wanted, updates, device, places), optimizers, schedulers)


def _warn_of_half_precision(tables: list[Table], fused: list[str]) -> list[str]:
    names = [t.full_name for t in tables if t.parameter.dtype == torch.float16 and t.full_name in fused]
    if not names:
        return []
    return [
        f"table '{names[0]}'{f' and {len(names) - 1} more' if names[1:] else ''} has float16 rows: FBGEMM rounds them "
        "after every update, so that they differ from an unsharded run's by about that rounding."
    ]


def _mode(name: str, options: TableOptions) -> str:
    """The update that is wanted; a table that every rank holds whole can only be updated by the user's optimizer."""
    mode = options.embedding_update or "auto"
    types = options.sharding_types or []
    if "data_parallel" not in types:
        return mode
    if len(types) > 1:
        raise ConfigError(
            f"table '{name}': sharding_types={types}: data_parallel (every rank holds the table, its gradient is "
            "averaged) must stand alone, because the table's update depends on it."
        )
    if mode not in ("auto", "dense"):
        raise ConfigError(f"table '{name}': embedding_update={mode!r} is not possible for a data_parallel table.")
    return "dense"


def tables_to_shard(module: nn.Module, settings: TableSettings, conversion: Conversion = NO_CONVERSION) -> list[Table]:
    """Return the tables of `module` that are not sharded yet and are to be: not those of `left_whole`."""
    tables = find_tables(module, conversion).tables
    kept = left_whole(tables, settings.by_table)
    return [table for table in tables if table.collection not in kept]


def _in_collection(options: TableOptions) -> TableOptions:
    """Return what keep_whole means for a table whose collection is sharded with other tables of it."""
    return TableOptions(sharding_types=["data_parallel"]) if options.keep_whole else options


def _demand(
    table: Table, options: TableOptions, update: TableUpdate, device: torch.device, places: NodeLayout
) -> TableConstraints:
    refuse_other_storage(table, options, device.type)
    if options.sharding_types == ["data_parallel"] and update.kind == "frozen":
        options = replace(options, sharding_types=["table_wise"], compute_kernels=None)
    optimizer = type(update.param_group.optimizer).__name__ if update.param_group else ""
    whole_rows_for = optimizer if update.needs_full_rows else ""
    types = allowed_types(table, options, places, whole_rows_for)
    kept_gradient = update.kind in ("sparse", "dense")
    return TableConstraints(
        types,
        kept_gradient,
        options,
        compute_kernels=allowed_kernels(table, types, options, kept_gradient, device.type),
        whole_rows_for=whole_rows_for,
        bytes_per_element=update.bytes_per_element,
        bytes_per_row=update.bytes_per_row,
    )


def _refuse_dense_on_meta(module: LightningModule, tables: list[Table], left_alone: Mapping[str, str]) -> None:
    keys = {table.key for table in tables}
    for name, parameter in module.named_parameters():
        if not parameter.is_meta or name in keys:
            continue
        path = next((path for path in left_alone if name.startswith(f"{path}.")), None)
        if path is not None:
            raise ShardingError(
                f"'{path}' is left alone ({left_alone[path]}), so that nobody gives its tables their rows. Build "
                "its collection with device='cpu', or outside of configure_model."
            )
        raise ShardingError(
            f"parameter '{name}' is on the meta device, and only tables get their values from the strategy. Build "
            "the module without torch.device('meta'); tables built in configure_model take no memory by themselves."
        )
