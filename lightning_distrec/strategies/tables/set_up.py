"""The steps from an unsharded module to sharded tables with optimizers, in their order: what `setup` calls.

look       find the tables, run configure_optimizers, translate its updates, refuse what is not exact
plan       ids per example are counted if asked for; rank 0 plans, all ranks receive
shard      torchrec's modules take the collections' places, rows travel to their shards
connect    param groups, learning rates and the user's calls meet the shards
"""

from dataclasses import replace
from functools import partial

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import OptimizerError, ShardingError
from lightning_distrec.optimizers.learning_rate import LearningRates
from lightning_distrec.optimizers.loss_weight import LossWeight
from lightning_distrec.optimizers.param_groups import rewrite_groups
from lightning_distrec.optimizers.replicas import ReplicaCheck
from lightning_distrec.optimizers.translation import NO_UPDATE, TableUpdate, frozen, sparse_form
from lightning_distrec.sharding.initial_weights import TableShard
from lightning_distrec.sharding.lookup.ids_check import IdsCheck
from lightning_distrec.sharding.lookup.lookup_outputs import TableUse
from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
from lightning_distrec.sharding.planning.written_plan import WrittenPlan, written_plan
from lightning_distrec.sharding.shard_tables import shard_tables
from lightning_distrec.sharding.sharded_tables import ShardedTables, refuse_foreign_shards, sharded_tables_of
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.tables.cluster_facts import find_facts
from lightning_distrec.strategies.tables.decisions import Decisions, TableSettings, decide, tables_to_shard
from lightning_distrec.strategies.tables.plan import plan_tables
from lightning_distrec.strategies.tables.pooling import estimate_pooling
from lightning_distrec.strategies.tables.table_run import TableRun
from lightning_distrec.strategies.tables.table_setup import TableSetup


def set_up_tables(run: TableRun) -> TableSetup | None:
    """Collective. Shard the module's tables and return them; None where it has none.

    For fit, tables that an earlier run sharded are sharded anew: the optimizers are new, and so is their state. For
    evaluation they stay as they are.
    """
    trainer, module, settings, consensus = run.trainer, run.module, run.settings, run.consensus
    present = sharded_tables_of(module)
    consensus.all_or_none("setup", lambda: refuse_foreign_shards(module))
    if present is not None and trainer.state.fn != TrainerFn.FITTING and not tables_to_shard(module, settings):
        updates = {table.full_name: frozen("evaluation only") for table in present.tables}
        setup = _look_up(present, updates, run)
        setup.written_plan = _written(present, run)
        return setup
    earlier = {} if present is None else present.parameters()
    if present is not None:
        present.put_originals_back()
    try:
        if present is not None:
            consensus.all_or_none("setup", lambda: _refuse_whole_again(present, module, settings))
        look = consensus.all_or_none(
            "setup", lambda: decide(trainer, module, settings, run.device, run.places, earlier)
        )
        _agree_on_tables(look.tables, consensus)
        for warning in look.warnings:
            rank_zero_warn(warning)
        if not look.tables:
            return None
        look = replace(look, demands=estimate_pooling(run, look))
        old_plan = present.plan if present is not None else {}
        made, told = plan_tables(run, look, old_plan, find_facts(run, look.tables))
        held = present.take_rows(look.tables) if present is not None else {}
        setup = _shard(run, look, made.plan, held)
        setup.facts = told
        setup.written_plan = _written(setup.shards, run)
        return setup
    except BaseException:
        if present is not None and present.sharded:
            present.put_proxies_back()
        raise


def _written(shards: ShardedTables, run: TableRun) -> WrittenPlan | None:
    if not run.settings.planning.save_plan:
        return None
    return written_plan(shards.tables, shards.plan, run.places, run.device.type)


def _refuse_whole_again(present: ShardedTables, module: LightningModule, settings: TableSettings) -> None:
    """Raise ShardingError where an embedding that an earlier run sharded would be whole now: it has no rows here."""
    found = {id(table.original) for table in tables_to_shard(module, settings, settings.conversion)}
    here = {id(child) for child in module.modules()}
    for table in present.tables:
        if id(table.original) in here and id(table.original) not in found:
            raise ShardingError(
                f"'{table.full_name}' was sharded in an earlier run of this module, and convert_embeddings="
                f"{settings.conversion.which!r} or a keep_whole would keep it whole now. Keep convert_embeddings, "
                "min_rows and keep_whole as they were, or load a checkpoint into a new module."
            )


def _agree_on_tables(tables: list[Table], consensus: Consensus) -> None:
    shapes = [(t.full_name, t.config.num_embeddings, t.config.embedding_dim, t.config.feature_names) for t in tables]
    mine = (shapes, [t.parameter.is_meta for t in tables])
    for rank, theirs in enumerate(consensus.all_gather(mine)):
        if theirs != mine:
            raise ShardingError(
                f"the ranks have different tables: rank {consensus.rank} has {shapes}, rank {rank} {theirs[0]}. "
                "Build the same module on every rank."
            )


def _shard(run: TableRun, look: Decisions, plan: ShardingByTable, held: dict[str, list[TableShard]]) -> TableSetup:
    unsharded = {table.full_name: table.parameter for table in look.tables}
    fused = {
        name: (update.arguments, update.param_group.label)
        if update.in_backward and update.param_group
        else (NO_UPDATE, "none")
        for name, update in look.updates.items()
        if plan[name].sharding_type != "data_parallel"
    }
    seed = run.consensus.all_gather(torch.initial_seed())[0]
    shards = shard_tables(run.module, look.tables, plan, fused, run.device, held, seed, run.settings.comms)
    shards.fill_optimizer_state({n: u.initial_state for n, u in look.updates.items() if u.in_backward})
    kept = {name: _rows_only(update) for name, update in look.updates.items() if not update.in_backward}
    shards.keep_gradients(kept)
    rewrite_groups(look.optimizers, unsharded, shards.parameters(), look.updates.keys() - kept.keys())
    setup = _look_up(shards, look.updates, run)
    setup.optimizers, setup.lr_scheduler_configs = look.optimizers, look.lr_scheduler_configs
    for number, optimizer in enumerate(setup.optimizers):
        stepped = partial(setup.after_optimizer_step, number)
        setup.undo.append(optimizer.register_step_post_hook(stepped).remove)
    for name in setup.fused_tables:
        for shard in shards.shards[name]:
            shard.weight.register_post_accumulate_grad_hook(partial(_refuse_direct_gradient, name))
    return setup


def _rows_only(update: TableUpdate) -> bool:
    """Whether gradients hold touched rows only; those of a frozen table suit its optimizer, if it is unfrozen later."""
    if update.kind == "frozen" and update.param_group is not None:
        return sparse_form(update.param_group)[0] is not None
    return update.kind != "dense"


def _look_up(shards: ShardedTables, updates: dict[str, TableUpdate], run: TableRun) -> TableSetup:
    """Give the proxies their lookups."""
    settings, consensus = run.settings, run.consensus
    replicas = ReplicaCheck(shards.replicated_parameters, consensus)
    weight = LossWeight(settings.loss_reduction, consensus, rank_zero_info)
    setup = TableSetup(
        shards=shards, updates=updates, learning_rates=LearningRates(updates), loss_weight=weight, replicas=replicas
    )
    compare_examples = weight.add_lookup if weight.counts_examples else None
    learning = any(update.kind != "frozen" for update in updates.values())
    if learning and weight.counts_examples and all(isinstance(t.plain, nn.Embedding) for t in shards.tables):
        rank_zero_info(
            "torchrec_sharded: lookups of nn.Embedding do not tell how many examples a batch has. Where ranks have "
            "batches of unequal size, gradients are the mean of the ranks' means, as under DDP."
        )
    fused_optimizers = shards.fused_optimizers()
    for path, sharded in shards.sharded.items():
        tables = shards.tables_of(path)
        names = {table.full_name for table in tables}
        kernels = setup.learning_rates.connect({n: o for n, o in fused_optimizers.items() if n in names})
        uses = {
            table.name: TableUse(
                shards.plan[table.full_name].sharding_type, partial(shards.learns, table.full_name), update.adds_up
            )
            for table in tables
            for update in [updates[table.full_name]]
        }
        check = IdsCheck(tables, settings.check_ids, consensus)
        push = partial(setup.learning_rates.push, kernels)
        lookup = ShardedLookup(
            sharded,
            tables,
            uses,
            shards.known_keys,
            check,
            push,
            run.output_dtype,
            compare_examples,
            partial(shards.note_used_tables, path),
        )
        shards.proxies[path].lookup = lookup
        setup.lookups.append(lookup)
    return setup


def _refuse_direct_gradient(name: str, weight: torch.Tensor) -> None:
    weight.grad = None
    raise OptimizerError(
        f"the loss uses the weight of '{name}' itself, not only rows that were looked up (an L2 term, say). Fused "
        "updates do not follow that. With embedding_update='sparse' a sum over elements (of squares, say) is exact, a "
        "norm is not, for each rank has a part of the table. Or build the term from the looked up vectors."
    )
