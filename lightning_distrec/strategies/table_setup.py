"""The steps from an unsharded module to sharded tables with optimizers, in their order: what `setup` calls.

look       find the tables, run configure_optimizers, translate its updates, refuse what is not exact
plan       rank 0 plans, all ranks receive
shard      torchrec's modules take the collections' places, rows travel to their shards
connect    param groups, learning rates and the user's calls meet the shards
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_distrec._compat import fbgemm_kernels, init_optimizers_and_schedulers, on_direct_gradient
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError, OptimizerError, ShardingError
from lightning_distrec.optimizers.backward_watch import BackwardWatch
from lightning_distrec.optimizers.learning_rate import LearningRates
from lightning_distrec.optimizers.translation import TableUpdate, frozen, rewrite_groups, translate
from lightning_distrec.sharding.ids_check import CheckIds, IdsCheck
from lightning_distrec.sharding.initial_weights import Piece
from lightning_distrec.sharding.lookup import ShardedLookup, TableUse
from lightning_distrec.sharding.plan import Demand, Places, Plan, allowed_types, make_plan, plan_together
from lightning_distrec.sharding.plan_report import UpdateCost, bytes_by_rank, check_memory, print_plan
from lightning_distrec.sharding.shard_tables import (
    ShardedTables,
    refuse_foreign_shards,
    shard_tables,
    sharded_tables_of,
)
from lightning_distrec.sharding.tables import FoundTables, Table, TableOptions, find_tables, options_by_table
from lightning_distrec.sharding.topology import make_topology, memory_bytes_per_rank
from lightning_distrec.strategies.refusals import gradient_hooks, refuse_what_is_not_exact


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """What the strategy was told about tables."""

    everywhere: TableOptions
    by_table: Mapping[str, Any]
    check_ids: CheckIds
    memory_bytes_per_rank: int | None
    batch_size_per_rank: int


@dataclass(kw_only=True)
class TableSetup:
    """Tables that are sharded, what updates them, and what is watched while they train."""

    shards: ShardedTables
    updates: dict[str, TableUpdate]
    learning_rates: LearningRates
    lookups: list[ShardedLookup] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    lr_scheduler_configs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backward_watch = BackwardWatch(self.fused_tables)

    @property
    def fused_tables(self) -> list[str]:
        """Full names of the tables that are updated inside of backward."""
        return [name for name, update in self.updates.items() if update.kind in ("fused", "fused_lazy")]

    def before_training_step(self) -> None:
        """Raise where something was changed since the start that the tables' updates do not follow."""
        self.learning_rates.check()
        self.shards.refuse_unfrozen()
        self._begin_step()

    def after_optimizer_step(self) -> None:
        """The gradients of the lookups so far are used up."""
        self.backward_watch.step()
        self._begin_step()

    def _begin_step(self) -> None:
        for lookup in self.lookups:
            lookup.begin_step()

    def load_state_dict(self, module: LightningModule, state: Mapping[str, Any], strict: bool) -> None:
        """Load a plain state_dict of the unsharded module, present on every rank, into the module and the shards."""
        keys = {table.key: table.full_name for table in self.shards.tables}
        self.shards.load({keys[key]: value for key, value in state.items() if key in keys})
        rest = {key: value for key, value in state.items() if key not in keys}
        missing, unexpected = module.load_state_dict(rest, strict=False)
        missing = [key for key in missing if key not in keys]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the checkpoint does not fit the module: missing {missing}, unexpected {unexpected}. "
                "Build the module that was saved, or set strict_loading=False on it."
            )


@dataclass(frozen=True)
class _Look:
    """What was seen in the unsharded module."""

    tables: list[Table]
    warnings: list[str]
    updates: dict[str, TableUpdate]
    demands: dict[str, Demand]
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[Any]


def set_up_tables(
    trainer: Trainer,
    module: LightningModule,
    settings: TableSettings,
    consensus: Consensus,
    device: torch.device,
    ranks_on_node: int,
) -> TableSetup | None:
    """Collective. Shard the module's tables and return them; None where it has none.

    For fit, tables that an earlier run sharded are sharded anew: the optimizers are new, and so is their state. For
    evaluation they stay as they are.
    """
    present = sharded_tables_of(module)
    consensus.all_or_none("setup", lambda: refuse_foreign_shards(module))
    if present is not None and trainer.state.fn != TrainerFn.FITTING and not find_tables(module).tables:
        return _look_up(present, {t.full_name: frozen("evaluation only") for t in present.tables}, settings, consensus)
    places = Places(consensus.num_ranks, ranks_on_node)
    if present is not None:
        present.step_out()
    try:
        look = consensus.all_or_none("setup", lambda: _look(trainer, module, settings, device, places))
        _agree_on_tables(look.tables, consensus)
        if not look.tables:
            return None
        plan = _plan(trainer, look, present.plan if present is not None else {}, settings, device, places)
    except BaseException:
        if present is not None:
            present.step_in()
        raise
    held = present.hand_over() if present is not None else {}
    return _shard(module, look, plan, settings, consensus, device, held)


def _plan(
    trainer: Trainer, look: _Look, old_plan: Plan, settings: TableSettings, device: torch.device, places: Places
) -> Plan:
    memory = memory_bytes_per_rank(device, places.ranks_on_node, settings.memory_bytes_per_rank)
    topology = make_topology(device, places.num_ranks, places.ranks_on_node, memory)
    costs = {n: UpdateCost(u.kind, u.why, u.bytes_per_element, u.bytes_per_row) for n, u in look.updates.items()}

    def planned() -> Plan:
        plan = _kept_plan(old_plan, look) or make_plan(
            look.tables, look.demands, topology, settings.batch_size_per_rank
        )
        check_memory(bytes_by_rank(look.tables, plan, costs, places.num_ranks), memory)
        return plan

    plan = plan_together(planned)
    if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING:
        print_plan(look.tables, plan, costs, bytes_by_rank(look.tables, plan, costs, places.num_ranks))
    for warning in look.warnings:
        rank_zero_warn(warning)
    return plan


def _look(
    trainer: Trainer, module: LightningModule, settings: TableSettings, device: torch.device, places: Places
) -> _Look:
    found = find_tables(module)
    tables = found.tables
    _refuse_dense_on_meta(module, found)
    options = options_by_table(tables, settings.everywhere, settings.by_table)
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    updates = {table.full_name: frozen("evaluation only") for table in tables}
    warnings = [f"'{path}' is left alone, whole on every rank: {why}." for path, why in found.left_alone.items()]
    if tables and trainer.state.fn == TrainerFn.FITTING:
        optimizers, schedulers = init_optimizers_and_schedulers(module)
        updates = translate(
            {table.full_name: table.parameter for table in tables},
            {name: _mode(name, option) for name, option in options.items()},
            optimizers,
            device.type,
            manual=not module.automatic_optimization,
        )
        kinds = {name: update.kind for name, update in updates.items()}
        refuse_what_is_not_exact(trainer, module, kinds)
        warnings += [*_warn_of_half_precision(tables), *_warn_of_hooks(module, kinds)]
    demands = {
        name: _demand(table, options[name], updates[name], device, places)
        for table in tables
        for name in [table.full_name]
    }
    return _Look(tables, warnings, updates, demands, optimizers, schedulers)


def _warn_of_half_precision(tables: list[Table]) -> list[str]:
    names = [table.full_name for table in tables if table.parameter.dtype == torch.float16]
    if not names:
        return []
    return [
        f"table '{names[0]}'{f' and {len(names) - 1} more' if names[1:] else ''} has float16 rows: FBGEMM rounds them "
        "after every update, so that they differ from an unsharded run's by about that rounding."
    ]


def _warn_of_hooks(module: LightningModule, kinds: Mapping[str, str]) -> list[str]:
    said = gradient_hooks(module, [name for name, kind in kinds.items() if kind in ("fused", "fused_lazy")])
    return [said] if said else []


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


def _demand(table: Table, options: TableOptions, update: TableUpdate, device: torch.device, places: Places) -> Demand:
    if options.sharding_types == ["data_parallel"] and update.kind == "frozen":
        options = replace(options, sharding_types=["table_wise"])
    optimizer = type(update.owner.optimizer).__name__ if update.owner else ""
    types = allowed_types(table, options, places, whole_rows_for=optimizer if update.whole_rows else "")
    dense = update.kind == "dense"
    if dense and not table.pooled and device.type == "cpu":
        # torchrec/distributed/embedding.py: the dense kernel of an EmbeddingCollection returns pooled rows on CPU.
        raise OptimizerError(
            f"table '{table.full_name}' of an EmbeddingCollection would need {optimizer} on its shard ({update.why}), "
            "for which torchrec's CPU kernels return wrong rows. Use SGD without momentum, Adagrad or RowWiseAdagrad "
            "for it (with manual optimization: and embedding_update='fused', where each backward is followed by its "
            "step), or train on GPUs."
        )
    return Demand(types, dense, options)


def _refuse_dense_on_meta(module: LightningModule, found: FoundTables) -> None:
    keys = {table.key for table in found.tables}
    for name, parameter in module.named_parameters():
        if not parameter.is_meta or name in keys:
            continue
        path = next((path for path in found.left_alone if name.startswith(f"{path}.")), None)
        if path is not None:
            raise ShardingError(
                f"'{path}' is left alone ({found.left_alone[path]}), so that nobody gives its tables their rows. Build "
                "its collection with device='cpu', or outside of configure_model."
            )
        raise ShardingError(
            f"parameter '{name}' is on the meta device, and only tables get their values from the strategy. Build "
            "the module without torch.device('meta'); tables built in configure_model take no memory by themselves."
        )


def _agree_on_tables(tables: list[Table], consensus: Consensus) -> None:
    mine = [(t.full_name, t.config.num_embeddings, t.config.embedding_dim, t.config.feature_names) for t in tables]
    for rank, theirs in enumerate(consensus.everyone((mine, [t.parameter.is_meta for t in tables]))):
        first = (mine, [t.parameter.is_meta for t in tables])
        if theirs != first:
            raise ShardingError(
                f"the ranks have different tables: rank {consensus.rank} has {mine}, rank {rank} {theirs[0]}. "
                "Build the same module on every rank."
            )


def _kept_plan(old: Plan, look: _Look) -> Plan | None:
    """Return the earlier plan where it still suits every table, so that rows stay where they are."""
    if set(old) != {table.full_name for table in look.tables}:
        return None
    if any(old[name].sharding_type not in demand.sharding_types for name, demand in look.demands.items()):
        return None
    if any(old[name].compute_kernel.startswith("fused_uvm") for name, demand in look.demands.items() if demand.dense):
        return None
    plan = {name: replace(sharding) for name, sharding in old.items()}
    for name, demand in look.demands.items():
        if demand.dense or plan[name].compute_kernel == "dense":
            plan[name].compute_kernel = "dense" if demand.dense else "fused"
    return plan


def _shard(
    module: LightningModule,
    look: _Look,
    plan: Plan,
    settings: TableSettings,
    consensus: Consensus,
    device: torch.device,
    held: dict[str, list[Piece]],
) -> TableSetup:
    unsharded = {table.full_name: table.parameter for table in look.tables}
    fused = {
        name: (update.arguments, update.owner.label if update.owner else "none")
        for name, update in look.updates.items()
        if update.kind != "dense"
    }
    still = {name for name, update in look.updates.items() if update.kind == "frozen"}
    seed = consensus.everyone(torch.initial_seed())[0]
    shards = shard_tables(module, look.tables, plan, fused, device, still, held, seed)
    shards.fill_optimizer_state({n: u.initial_state for n, u in look.updates.items() if u.initial_state})
    dense = {name for name, update in look.updates.items() if update.kind == "dense"}
    rewrite_groups(look.optimizers, unsharded, {n: p for n, p in shards.parameters().items() if n in dense})
    setup = _look_up(shards, look.updates, settings, consensus)
    setup.optimizers, setup.lr_scheduler_configs = look.optimizers, look.lr_scheduler_configs
    return setup


def _look_up(
    shards: ShardedTables, updates: dict[str, TableUpdate], settings: TableSettings, consensus: Consensus
) -> TableSetup:
    """Put our lookups in the place of torchrec's forwards."""
    setup = TableSetup(shards=shards, updates=updates, learning_rates=LearningRates(updates))
    fused_optimizers = shards.fused_optimizers()
    for path, sharded in shards.sharded.items():
        tables = shards.tables_of(path)
        names = {table.full_name for table in tables}
        kernels = setup.learning_rates.connect({n: o for n, o in fused_optimizers.items() if n in names})
        uses = {
            table.name: TableUse(shards.plan[table.full_name].sharding_type, update.kind, update.adds_up)
            for table in tables
            for update in [updates[table.full_name]]
        }
        check = IdsCheck(tables, settings.check_ids, consensus)
        lookup = ShardedLookup(sharded, tables, uses, check, partial(setup.learning_rates.push, kernels))
        sharded.forward = lookup  # type: ignore[assignment]
        setup.lookups.append(lookup)
        on_direct_gradient(fbgemm_kernels(sharded), partial(_refuse_direct_gradient, path))
    return setup


def _refuse_direct_gradient(path: str) -> None:
    raise OptimizerError(
        f"the loss uses the weights of '{path}' themselves, not only rows that were looked up (an L2 term, say). "
        "Fused updates do not follow that. Set embedding_update='dense', or build the term from the looked up vectors."
    )
