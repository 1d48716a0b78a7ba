"""Decides about each table of an unsharded module: whether to shard it, its update, its
constraints, what to refuse."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_distrec._compat.lightning import init_optimizers_and_schedulers
from lightning_distrec.errors import ConfigError, ShardingError
from lightning_distrec.optimizers.param_groups import StateOnMeta
from lightning_distrec.optimizers.table_optimizer import (
    OwnOptimizer,
    build_table_optimizers,
    parse_table_optimizer,
)
from lightning_distrec.optimizers.torchrec_optimizers import (
    ANNOUNCED,
    members_of,
    refuse_markers,
    see_through,
    share_kernels,
    take_in_backward,
)
from lightning_distrec.optimizers.translation import TableUpdate, frozen, name_optimizer, translate
from lightning_distrec.optimizers.updates_in_backward import (
    hooks_without_gradients,
    obstacle_to_backward_updates,
    refuse_inexact_in_backward,
    refuse_inexact_settings,
)
from lightning_distrec.sharding.meta_tables import give_rows_to_unsharded
from lightning_distrec.sharding.meta_weight import can_have_rows, give_rows_to_buffers
from lightning_distrec.sharding.plain_embeddings import NO_CONVERSION
from lightning_distrec.sharding.planning.constraints import (
    TableConstraints,
    allowed_kernels,
    allowed_types,
)
from lightning_distrec.sharding.planning.table_options import (
    TableOptions,
    options_by_table,
    options_of_modules,
    refuse_named_odd_dims,
    replicated_collections,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table, find_tables
from lightning_distrec.strategies.tables.mapped_tables import (
    refuse_shared_features,
    refuse_unsharded_mappings,
    with_dynamic_ids,
    with_mapping,
)
from lightning_distrec.strategies.tables.replicas import (
    refuse_with_groups,
    warn_of_replicas,
    why_kept,
)
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs, TableSettings
from lightning_distrec.strategies.tables.weight_reads import read_tables
from lightning_distrec.units import format_bytes


@dataclass(frozen=True)
class SelectedTables:
    """The tables to shard in a module, and the options of each."""

    tables: list[Table]
    options: dict[str, TableOptions]
    """By full name."""
    left_alone: dict[str, str]
    """Path -> reason, of modules that hold tables and are not sharded."""
    replicated: set[str]
    """Collections that stay ordinary layers, because their tables have replicated=True."""
    read: dict[str, str]
    """Full name -> where the module reads its weight, of sharded tables whose weight is not
    gathered."""
    shipped: list[str]
    """Which modules ship options, for reports."""

    @property
    def warnings(self) -> list[str]:
        """Modules with tables that are not sharded, and tables whose weight will be missing."""
        unsharded = [
            f"'{path}' is not sharded, every rank has all of it: {reason}."
            for path, reason in self.left_alone.items()
        ]
        return unsharded + [
            f"the weight of table '{name}' is read in {method}, but each rank has a shard of it, "
            "so that this raises. "
            f"Set tables={{'{name}': {{'gathered_weight': True}}}}, or 'replicated': True."
            for name, method in self.read.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The tables to shard in an unsharded module, with the updates and constraints of each by full
    name."""

    selection: SelectedTables
    updates: dict[str, TableUpdate]
    constraints: dict[str, TableConstraints]
    warnings: list[str] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    """Those of configure_optimizers."""
    lr_scheduler_configs: list[Any] = field(default_factory=list)
    own_optimizers: list[OwnOptimizer] = field(default_factory=list)
    """Those of tables alone, by table_optimizer."""
    in_backward: dict[str, Optimizer] = field(default_factory=dict)
    """Full name of a table -> its optimizer by apply_optimizer_in_backward."""

    @property
    def tables(self) -> list[Table]:
        """The tables to shard."""
        return self.selection.tables

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """Optimizers of tables alone."""
        return [own_optimizer.optimizer for own_optimizer in self.own_optimizers]


def select_tables(
    module: nn.Module, settings: TableSettings, left_alone: Mapping[str, str] | None = None
) -> SelectedTables:
    """Find the tables to shard in an unsharded module: the one place that looks. Raises
    ConfigError, ShardingError.

    left_alone: path -> reason, of what is not sharded because another rank cannot.
    """
    give_rows_to_buffers(module)
    candidates = find_tables(module, settings.conversion)
    if left_alone:
        shardable = [table for table in candidates.tables if table.collection not in left_alone]
        candidates = replace(
            candidates, tables=shardable, left_alone=candidates.left_alone | dict(left_alone)
        )
    refuse_named_odd_dims(
        candidates.tables, candidates.odd_tables, candidates.left_alone, settings.table_options
    )
    shipped, shipped_in_words = options_of_modules(module, candidates.tables)
    options = options_by_table(
        [*candidates.tables, *candidates.odd_tables],
        settings.default_options,
        settings.table_options,
        shipped,
    )
    replicated = replicated_collections(candidates.tables, settings.table_options, shipped)
    tables = [table for table in candidates.tables if table.collection not in replicated]
    # Before weights are looked for: it may give an unsharded table another number of rows.
    tables = [with_dynamic_ids(table, options[table.full_name]) for table in tables]
    refuse_shared_features(tables)
    read = read_tables(module, tables, options)
    # Asked for by its path, an embedding is sharded although its weight is read, and the read
    # raises by name.
    if isinstance(settings.conversion.selected, str):  # not asked for by name
        # On meta there may be no rows to keep on every rank: such a table is sharded, and reading
        # its weight raises.
        tables = [
            table
            for table in tables
            if table.full_name not in read
            or (table.parameter.is_meta and not can_have_rows(table.parameter))
        ]
    # A table with replicated=True is still here where the collection is sharded because of its
    # other tables.
    table_options = {
        name: TableOptions(sharding_types=["data_parallel"])
        if options[name].replicated
        else options[name]
        for name in (table.full_name for table in tables)
    }
    left_alone = candidates.left_alone | {
        name: f"its weight is read in {method}. To shard it, set tables={{'{name}': "
        f"{{'gathered_weight': True}}}}"
        for name, method in read.items()
        if name not in table_options
    }
    read = {name: method for name, method in read.items() if name in table_options}
    give_rows_to_unsharded(module, {id(table.parameter) for table in tables})
    return SelectedTables(tables, table_options, left_alone, replicated, read, shipped_in_words)


class FitUpdates(NamedTuple):
    """What updates each table in a fit."""

    updates: dict[str, TableUpdate]
    """By full name."""
    own_optimizers: list[OwnOptimizer]
    in_backward: dict[str, Optimizer]
    warnings: list[str]


def updates_in_fit(
    selection: SelectedTables,
    module: LightningModule,
    optimizers: list[Optimizer],
    trainer: Any,
    precision: Any,
    device: torch.device,
    earlier: Mapping[str, list[nn.Parameter]],
    retained_for: str = "",
) -> FitUpdates:
    """Return what updates each table in a fit, the tables' own optimizers, and warnings.

    optimizers: those of configure_optimizers, which tables with an own one leave.
    trainer: or what has its callbacks, precision, accumulate_grad_batches and gradient_clip_val.
    precision: its plugin, or what has the plugin's scaler. earlier: see `decide`. retained_for:
    what else needs the gradients. Raises OptimizerError, UnsupportedError.
    """
    tables = selection.tables
    parameters = {table.full_name: table.parameter for table in tables}
    table_optimizers = {
        name: parse_table_optimizer(f"optimizer of table '{name}'", option.optimizer)
        for name, option in selection.options.items()
        if option.optimizer is not None
    }
    members = members_of(optimizers)
    in_backward = take_in_backward(parameters, table_optimizers, members, earlier)
    own_optimizers = build_table_optimizers(
        parameters, table_optimizers, optimizers, module.automatic_optimization, earlier
    )
    modes = {name: _mode(name, option) for name, option in selection.options.items()}
    all_optimizers = [
        *members,
        *(entry.optimizer for entry in own_optimizers),
        *in_backward.values(),
    ]
    updates: dict[str, TableUpdate] = {}
    # Where one process steps in every backward too, nothing that comes between backward and step is
    # an obstacle.
    obstacle = retained_for or obstacle_to_backward_updates(trainer, module, precision)
    if module.automatic_optimization and len(members) > len(optimizers):
        obstacle = obstacle or "each optimizer of CombinedOptimizer runs backward"
    for names, reason in [
        (parameters.keys() - in_backward.keys(), obstacle),
        (in_backward.keys(), retained_for),
    ]:
        updates |= translate(
            {name: parameter for name, parameter in parameters.items() if name in names},
            modes,
            all_optimizers,
            device.type,
            reason,
            {table.full_name for table in tables if table.plain is not None},
            earlier,
        )
    updates |= share_kernels({
        name: name_optimizer(updates[name], ANNOUNCED) for name in in_backward
    })
    updates |= {
        name: name_optimizer(updates[name], "table_optimizer's ")
        for own_optimizer in own_optimizers
        for name in own_optimizer.tables
    }
    updates |= {
        name: replace(
            updates[name],
            reason=f"gathered weight: {format_bytes(parameters[name].nbytes)} and its gradient on "
            "each rank",
        )
        for name, option in selection.options.items()
        if option.gathered_weight and updates[name].kind == "dense"
    }
    fused = [name for name, update in updates.items() if update.in_backward]
    refuse_inexact_settings(trainer, precision, [name for name in fused if name not in in_backward])
    options = selection.options
    averaged = [
        name
        for name in in_backward
        if retained_for or "data_parallel" in (options[name].sharding_types or ())
    ]
    refuse_inexact_in_backward(trainer, precision, list(in_backward), averaged)
    hooks = hooks_without_gradients(
        trainer, module, [name for name in fused if name not in in_backward]
    )
    warnings = [*_warn_of_half_precision(tables, fused), *filter(None, [hooks])]
    in_order = {name: updates[name] for name in parameters}
    return FitUpdates(in_order, own_optimizers, in_backward, warnings)


def _warn_of_untrained(tables: list[Table], updates: Mapping[str, TableUpdate]) -> list[str]:
    names = [
        t.full_name
        for t in tables
        if updates[t.full_name].kind == "frozen" and t.parameter.requires_grad
    ]
    if not names:
        return []
    return [
        f"table '{names[0]}'{f' and {len(names) - 1} more' if names[1:] else ''} can be trained "
        "and is in no "
        "optimizer: it stays as it is. Give it to one in configure_optimizers, by table_optimizer "
        "or by "
        "apply_optimizer_in_backward; or set requires_grad=False, if it is to stay."
    ]


def constraints_of(
    selection: SelectedTables,
    updates: Mapping[str, TableUpdate],
    device: torch.device,
    layout: NodeLayout,
) -> dict[str, TableConstraints]:
    """Return the constraints of each table, by full name. Raises ConfigError, PlanError: they
    contradict each other."""
    return {
        t.full_name: _constraints(
            t, selection.options[t.full_name], updates[t.full_name], device, layout
        )
        for t in selection.tables
    }


def decide(
    inputs: SetUpInputs, selection: SelectedTables, earlier: Mapping[str, list[nn.Parameter]]
) -> Decisions:
    """Decide about the selected tables on this rank, without exchanges between ranks.

    earlier: full name -> the shards of an earlier run of the module.
    For fit, configure_optimizers runs, and its updates are translated. Raises what is refused: see
    docs.
    """
    trainer, module, tables = inputs.trainer, inputs.module, selection.tables
    if inputs.fits:
        refuse_unsharded_mappings(module, selection.left_alone, inputs.layout.num_ranks)
    _refuse_dense_on_meta(
        module,
        tables,
        selection.left_alone | dict.fromkeys(selection.replicated, "replicated=True"),
    )
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    own_optimizers: list[OwnOptimizer] = []
    in_backward: dict[str, Optimizer] = {}
    updates = {table.full_name: frozen("evaluation only") for table in tables}
    warnings = selection.warnings
    if tables and inputs.fits:
        with StateOnMeta(table.parameter for table in tables):
            optimizers, schedulers = init_optimizers_and_schedulers(module, refuse_markers)
            optimizers = see_through(optimizers)
            updates, own_optimizers, in_backward, update_warnings = updates_in_fit(
                selection,
                module,
                optimizers,
                trainer,
                trainer.precision_plugin,
                inputs.device,
                earlier,
                why_kept(inputs.groups),
            )
        warnings += [
            *update_warnings,
            *_warn_of_untrained(tables, updates),
            *warn_of_replicas(inputs.groups),
        ]
        refuse_with_groups(inputs.groups, updates, selection.options, trainer.callbacks)  # type: ignore[attr-defined]
        if own_optimizers:
            _report_left_embeddings(module, tables)
    return Decisions(
        selection=selection,
        updates=updates,
        constraints=constraints_of(selection, updates, inputs.device, inputs.group_layout),
        warnings=warnings,
        optimizers=optimizers,
        lr_scheduler_configs=[
            *schedulers,
            *(
                scheduler
                for own_optimizer in own_optimizers
                for scheduler in own_optimizer.schedulers
            ),
        ],
        own_optimizers=own_optimizers,
        in_backward=in_backward,
    )


def _report_left_embeddings(module: nn.Module, tables: list[Table]) -> None:
    """Log which embeddings table_optimizer does not update, where some are not sharded."""
    sharded = {id(table.parameter) for table in tables}
    kinds = (nn.Embedding, nn.EmbeddingBag)
    unsharded = [
        path
        for path, m in module.named_modules()
        if isinstance(m, kinds) and id(m.weight) not in sharded
    ]
    if unsharded:
        suffix = f" and {len(unsharded) - 1} more" if unsharded[1:] else ""
        rank_zero_info(
            f"table_optimizer: '{unsharded[0]}'{suffix} is not sharded, and stays with the "
            "optimizer of "
            "configure_optimizers. convert_embeddings, min_rows and replicated decide what is "
            "sharded."
        )


def _warn_of_half_precision(tables: list[Table], fused: list[str]) -> list[str]:
    names = [
        t.full_name for t in tables if t.parameter.dtype == torch.float16 and t.full_name in fused
    ]
    if not names:
        return []
    return [
        f"table '{names[0]}'{f' and {len(names) - 1} more' if names[1:] else ''} has float16 "
        "rows: FBGEMM rounds them "
        "after every update, so that they differ from an unsharded run's by about that rounding."
    ]


def _mode(name: str, options: TableOptions) -> str:
    """Return the wanted update; only the user's optimizer can update a data_parallel table."""
    mode = options.embedding_update or "auto"
    if options.gathered_weight:
        return "dense"
    types = options.sharding_types or []
    # A replicated table's gradient is averaged over the ranks, so the user's optimizer steps it
    # alike on each.
    if "data_parallel" not in types:
        return mode
    if len(types) > 1:
        raise ConfigError(
            f"table '{name}': sharding_types={types}: data_parallel (every rank holds the table, "
            "its gradient is "
            "averaged) must stand alone, because the table's update depends on it."
        )
    if mode not in ("auto", "dense"):
        raise ConfigError(
            f"table '{name}': embedding_update={mode!r} is not possible for a data_parallel table."
        )
    return "dense"


def has_unsharded_collections(module: nn.Module, settings: TableSettings) -> bool:
    """Return whether collections were added to a module whose tables an earlier run has sharded."""
    # Plain embeddings are not looked at: those that stay unsharded were decided about in the
    # earlier run.
    tables = find_tables(module, NO_CONVERSION).tables
    shipped, _ = options_of_modules(module, tables)
    replicated = replicated_collections(tables, settings.table_options, shipped)
    return any(table.collection not in replicated for table in tables)


def _constraints(
    table: Table,
    options: TableOptions,
    update: TableUpdate,
    device: torch.device,
    layout: NodeLayout,
) -> TableConstraints:
    # Ids are mapped where their rows are, so such a table is row-wise whatever the options allow
    # otherwise.
    options = with_mapping(table, options, layout)
    if options.sharding_types == ["data_parallel"] and update.kind == "frozen":
        options = replace(options, sharding_types=["table_wise"], compute_kernels=None)
    optimizer = type(update.param_group.optimizer).__name__ if update.param_group else ""
    unsplit_rows_for = optimizer if update.needs_full_rows else ""
    types = allowed_types(table, options, layout, unsplit_rows_for)
    kept_gradient = update.kind in ("sparse", "dense")
    return TableConstraints(
        types,
        kept_gradient,
        options,
        compute_kernels=allowed_kernels(table, types, options, kept_gradient, device.type),
        unsplit_rows_for=unsplit_rows_for,
        bytes_per_element=update.bytes_per_element,
        bytes_per_row=update.bytes_per_row,
        update=update.kind,
        optimizer=optimizer,
        update_reason=update.reason,
    )


def _refuse_dense_on_meta(
    module: LightningModule, tables: list[Table], left_alone: Mapping[str, str]
) -> None:
    keys = {table.key for table in tables}
    for name, parameter in module.named_parameters():
        if not parameter.is_meta or name in keys:
            continue
        path = next((path for path in left_alone if name.startswith(f"{path}.")), None)
        if path is not None:
            raise ShardingError(
                f"'{path}' is not sharded ({left_alone[path]}), so that its tables on the meta "
                "device get no rows. "
                "Build its collection with device='cpu', or outside of configure_model."
            )
        raise ShardingError(
            f"parameter '{name}' is on the meta device, and only tables get their values from the "
            "strategy. Build "
            "the module without torch.device('meta'); tables built in configure_model take no "
            "memory by themselves."
        )
