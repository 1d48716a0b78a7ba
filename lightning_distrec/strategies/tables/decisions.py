"""Decides about each table of an unsharded module: whether to shard it, its update, its
constraints, what to refuse."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_distrec._compat.lightning import init_optimizers_and_schedulers
from lightning_distrec.errors import ConfigError, ShardingError
from lightning_distrec.optimizers.param_groups import StateOnMeta
from lightning_distrec.optimizers.table_optimizer import (
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
from lightning_distrec.optimizers.translation import TableUpdate, name_optimizer, translate
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
from lightning_distrec.strategies.tables.set_up_inputs import (
    Decisions,
    SetUpInputs,
    TableRecord,
    TableSettings,
)
from lightning_distrec.strategies.tables.weight_reads import read_tables
from lightning_distrec.units import format_bytes


def select_tables(
    module: nn.Module, settings: TableSettings, left_alone: Mapping[str, str] | None = None
) -> Decisions:
    """Find the tables to shard in an unsharded module: the one place that looks.

    left_alone: path -> reason, of what is not sharded because another rank cannot.
    Raises ConfigError, ShardingError.
    """
    give_rows_to_buffers(module)
    candidates = find_tables(module, settings.conversion)
    reasons = candidates.left_alone | dict(left_alone or {})
    tables = [table for table in candidates.tables if table.collection not in reasons]
    refuse_named_odd_dims(tables, candidates.odd_tables, reasons, settings.table_options)
    shipped, shipped_in_words = options_of_modules(module, tables)
    options = options_by_table(
        [*tables, *candidates.odd_tables], settings.default_options, settings.table_options, shipped
    )
    replicated = replicated_collections(tables, settings.table_options, shipped)
    tables = [table for table in tables if table.collection not in replicated]
    # Before weights are looked for: it may give an unsharded table another number of rows.
    tables = [with_dynamic_ids(table, options[table.full_name]) for table in tables]
    refuse_shared_features(tables)
    read = read_tables(module, tables, options)
    records = []
    for table in tables:
        name = table.full_name
        read_in = read.get(name, "")
        table_options = options[name]
        if read_in and _stays_full(table, settings):
            reasons[name] = (
                f"its weight is read in {read_in}. To shard it, write softmax_loss(queries, table, "
                "targets), of lightning_distrec.retrieval, for a cross entropy over all rows, or "
                "name the table in convert_embeddings: queries @ weight.T is exact then. For other "
                f"reads set tables={{'{name}': {{'gathered_weight': True}}}}"
            )
            continue
        # Here where its collection is sharded because of its other tables.
        if table_options.replicated:
            table_options = TableOptions(sharding_types=["data_parallel"])
        records.append(TableRecord(table=table, options=table_options, read_in=read_in))
    give_rows_to_unsharded(module, {id(record.table.parameter) for record in records})
    return Decisions(
        records=records,
        left_alone=reasons,
        replicated=replicated,
        shipped=shipped_in_words,
        warnings=_warn_of_selection(records, reasons),
    )


def _stays_full(table: Table, settings: TableSettings) -> bool:
    """Return whether a table whose weight is read, and not gathered, stays on every rank."""
    # Asked for by its path, an embedding is sharded, and the read raises by name.
    if not isinstance(settings.conversion.selected, str):
        return False
    # On meta there may be no rows to keep: such a table is sharded, and reading it raises.
    return not table.parameter.is_meta or can_have_rows(table.parameter)


def _warn_of_selection(records: list[TableRecord], left_alone: Mapping[str, str]) -> list[str]:
    """Return which modules with tables are not sharded, and which weights will be missing."""
    warnings = []
    for path, reason in left_alone.items():
        warnings.append(f"'{path}' is not sharded, every rank has all of it: {reason}.")
    for record in records:
        if record.read_in:
            warnings.append(
                f"the weight of table '{record.name}' is read in {record.read_in}, but each rank "
                "has a shard of it. queries @ weight.T is exact for F.cross_entropy, topk and "
                "argmax, as softmax_loss of lightning_distrec.retrieval is; other reads raise. For "
                f"these set tables={{'{record.name}': {{'gathered_weight': True}}}}, or "
                "'replicated': True."
            )
    return warnings


def has_unsharded_collections(module: nn.Module, settings: TableSettings) -> bool:
    """Return whether collections were added to a module whose tables an earlier run has sharded."""
    # Plain embeddings that stay unsharded were decided about in the earlier run.
    tables = find_tables(module, NO_CONVERSION).tables
    shipped, _ = options_of_modules(module, tables)
    replicated = replicated_collections(tables, settings.table_options, shipped)
    return any(table.collection not in replicated for table in tables)


# ------------------------------------------------------------------------------- updates in a fit


def decide_updates(
    decisions: Decisions,
    module: LightningModule,
    trainer: Any,
    precision: Any,
    device: torch.device,
    earlier: Mapping[str, list[nn.Parameter]],
    retained_for: str = "",
) -> None:
    """Decide what updates each table in a fit, once `decisions` has the optimizers of the module.

    trainer: or what has its callbacks, precision, accumulate_grad_batches and gradient_clip_val.
    precision: its plugin, or what has the plugin's scaler. earlier: see `decide`. retained_for:
    what else needs the gradients. Tables with an optimizer of their own leave those of the module.
    Raises OptimizerError, UnsupportedError.
    """
    records = decisions.records
    optimizers = decisions.optimizers
    parameters = {record.name: record.table.parameter for record in records}
    described = {}
    for record in records:
        if record.options.optimizer is not None:
            place = f"optimizer of table '{record.name}'"
            described[record.name] = parse_table_optimizer(place, record.options.optimizer)
    members = members_of(optimizers)
    automatic = module.automatic_optimization
    in_backward = take_in_backward(parameters, described, members, earlier)
    decisions.own_optimizers = build_table_optimizers(
        parameters, described, optimizers, automatic, earlier
    )
    all_optimizers = [*members, *decisions.table_optimizers, *in_backward.values()]
    modes = {record.name: _mode(record.name, record.options) for record in records}
    plain = [record.name for record in records if record.table.plain is not None]

    def translated(names: Iterable[str], obstacle: str) -> dict[str, TableUpdate]:
        some = {name: parameters[name] for name in names}
        return translate(some, modes, all_optimizers, device.type, obstacle, plain, earlier)

    obstacle = retained_for or obstacle_to_backward_updates(trainer, module, precision)
    if automatic and len(members) > len(optimizers):
        obstacle = obstacle or "each optimizer of CombinedOptimizer runs backward"
    updates = translated([name for name in parameters if name not in in_backward], obstacle)
    # Where one process steps in every backward too, nothing between backward and step matters.
    updates |= translated(in_backward, retained_for)
    updates |= share_kernels({n: name_optimizer(updates[n], ANNOUNCED) for n in in_backward})
    for own_optimizer in decisions.own_optimizers:
        for name in own_optimizer.tables:
            updates[name] = name_optimizer(updates[name], "table_optimizer's ")
    for record in records:
        record.update, record.in_backward = updates[record.name], in_backward.get(record.name)
        if record.options.gathered_weight and record.update.kind == "dense":
            size = format_bytes(record.table.parameter.nbytes)
            reason = f"gathered weight: {size} and its gradient on each rank"
            record.update = replace(record.update, reason=reason)
    _refuse_inexact(decisions, module, trainer, precision, retained_for)


def _refuse_inexact(
    decisions: Decisions, module: LightningModule, trainer: Any, precision: Any, retained_for: str
) -> None:
    """Raise where updates inside of backward are not exact; add warnings."""
    fused = []
    averaged = []
    half = []
    for record in decisions.records:
        if not record.update.in_backward and record.in_backward is None:
            continue
        if record.in_backward is None:
            fused.append(record.name)
        elif retained_for or "data_parallel" in (record.options.sharding_types or ()):
            averaged.append(record.name)
        if record.update.in_backward and record.table.parameter.dtype == torch.float16:
            half.append(record.name)
    refuse_inexact_settings(trainer, precision, fused)
    refuse_inexact_in_backward(trainer, precision, list(decisions.in_backward), averaged)
    if half:
        decisions.warnings.append(
            f"table {_first_of(half)} has float16 rows: FBGEMM rounds them after every update, so "
            "that they differ from an unsharded run's by about that rounding."
        )
    hooks = hooks_without_gradients(trainer, module, fused)
    if hooks:
        decisions.warnings.append(hooks)


def _first_of(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if names[1:] else "")


def _warn_of_untrained(decisions: Decisions) -> None:
    names = []
    for record in decisions.records:
        if record.update.kind == "frozen" and record.table.parameter.requires_grad:
            names.append(record.name)
    if names:
        decisions.warnings.append(
            f"table {_first_of(names)} can be trained and is in no optimizer: it stays as it is. "
            "Give it to one in configure_optimizers, by table_optimizer or by "
            "apply_optimizer_in_backward; or set requires_grad=False, if it is to stay."
        )


def decide_constraints(decisions: Decisions, device: torch.device, layout: NodeLayout) -> None:
    """Decide what a plan may do with each table. Raises ConfigError, PlanError: contradictions."""
    for record in decisions.records:
        record.constraints = _constraints(record, device, layout)


def decide(
    inputs: SetUpInputs, decisions: Decisions, earlier: Mapping[str, list[nn.Parameter]]
) -> None:
    """Decide about the selected tables on this rank, without exchanges between ranks.

    earlier: full name -> the shards of an earlier run of the module.
    For fit, configure_optimizers runs, and its updates are translated. Raises what is refused: see
    docs.
    """
    trainer = inputs.trainer
    module = inputs.module
    tables = decisions.tables
    unsharded = decisions.left_alone | dict.fromkeys(decisions.replicated, "replicated=True")
    if inputs.fits:
        refuse_unsharded_mappings(module, decisions.left_alone, inputs.layout.num_ranks)
    _refuse_dense_on_meta(module, tables, unsharded)
    if tables and inputs.fits:
        with StateOnMeta(table.parameter for table in tables):
            optimizers, schedulers = init_optimizers_and_schedulers(module, refuse_markers)
            decisions.optimizers = see_through(optimizers)
            plugin = trainer.precision_plugin
            retained_for = why_kept(inputs.groups)
            decide_updates(decisions, module, trainer, plugin, inputs.device, earlier, retained_for)
        _warn_of_untrained(decisions)
        decisions.warnings += warn_of_replicas(inputs.groups)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        refuse_with_groups(inputs.groups, decisions.records, callbacks)
        decisions.lr_scheduler_configs = list(schedulers)
        for own_optimizer in decisions.own_optimizers:
            decisions.lr_scheduler_configs += own_optimizer.schedulers
        if decisions.own_optimizers:
            _report_left_embeddings(module, tables)
    decide_constraints(decisions, inputs.device, inputs.group_layout)


def _report_left_embeddings(module: nn.Module, tables: list[Table]) -> None:
    """Log which embeddings table_optimizer does not update, where some are not sharded."""
    sharded = {id(table.parameter) for table in tables}
    unsharded = []
    for path, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and id(child.weight) not in sharded:
            unsharded.append(path)
    if unsharded:
        rank_zero_info(
            f"table_optimizer: {_first_of(unsharded)} is not sharded, and stays with the optimizer "
            "of configure_optimizers. convert_embeddings, min_rows and replicated decide what is "
            "sharded."
        )


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
            "its gradient is averaged) must stand alone, because the table's update depends on it."
        )
    if mode not in ("auto", "dense"):
        raise ConfigError(
            f"table '{name}': embedding_update={mode!r} is not possible for a data_parallel table."
        )
    return "dense"


def _constraints(record: TableRecord, device: torch.device, layout: NodeLayout) -> TableConstraints:
    table = record.table
    update = record.update
    # Ids are mapped where their rows are, so such a table is row-wise whatever else is allowed.
    options = with_mapping(table, record.options, layout)
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
                "device get no rows. Build its collection with device='cpu', or outside of "
                "configure_model."
            )
        raise ShardingError(
            f"parameter '{name}' is on the meta device, and only tables get their values from the "
            "strategy. Build the module without torch.device('meta'); tables built in "
            "configure_model take no memory by themselves."
        )
