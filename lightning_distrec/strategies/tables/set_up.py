"""The steps from an unsharded module to sharded tables with optimizers, in their order: what
`setup` calls.

- decide: find the tables, run configure_optimizers, translate its updates, refuse what is not
  exact.
- count ids: only with planning.estimate_pooling.
- cluster facts: ranks, memory, reservation, bandwidths.
- plan: rank 0 plans, all ranks receive the plan.
- shard: torchrec's modules take the collections' places, rows are sent to their shards.
- look up: the proxies get their lookups.
- connect: optimizers and the shards.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_distrec._compat.torch import (
    drop_in_backward_hooks,
    in_backward_optimizers,
    mark_in_backward,
    without_in_backward,
)
from lightning_distrec.errors import OptimizerError, ShardingError
from lightning_distrec.gpu import require_kernels
from lightning_distrec.kept_parameters import kept_up
from lightning_distrec.optimizers.param_groups import replace_parameters, rewrite_groups
from lightning_distrec.optimizers.torchrec_optimizers import members_of
from lightning_distrec.optimizers.translation import (
    NO_UPDATE,
    UPDATED_IN_BACKWARD,
    LearningRates,
    TableUpdate,
    can_sum_rows,
    frozen,
    sparse_form,
)
from lightning_distrec.sharding.initial_weights import TableShard
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup, TableUse
from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
from lightning_distrec.sharding.meta_weight import written_digest
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.shard_tables import TableSharding, detach_rows, shard_tables
from lightning_distrec.sharding.sharded_tables import (
    ShardedTables,
    refuse_foreign_shards,
    sharded_tables_of,
)
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.tables import Table, find_tables
from lightning_distrec.sharding.weights.shard_access import without_guards
from lightning_distrec.strategies.data_parallel.losses import LossWeight
from lightning_distrec.strategies.tables.cluster_facts import check_start_memory, find_facts
from lightning_distrec.strategies.tables.decisions import (
    Decisions,
    SelectedTables,
    decide,
    has_unsharded_collections,
    select_tables,
)
from lightning_distrec.strategies.tables.mapped_tables import mapped_ids
from lightning_distrec.strategies.tables.plan_of_run import (
    plan_of,
    plan_tables,
    save_with_logs,
    with_counted_ids,
)
from lightning_distrec.strategies.tables.run_tables import RunTables
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs, with_batch_size


def set_up_tables(inputs: SetUpInputs) -> RunTables | None:
    """Collective. Shard the module's tables and return them; None where it has none."""
    # For fit, tables that an earlier run sharded are sharded again: the optimizers are new, and so
    # is their state. For evaluation they stay as they are.
    if inputs.fits:
        inputs = replace(
            inputs, settings=with_batch_size(inputs.settings, inputs.trainer, inputs.module)
        )
    earlier = sharded_tables_of(inputs.module)
    # Whatever may raise on one rank alone goes through all_or_none: the others would wait in the
    # next collective.
    inputs.consensus.all_or_none("setup", lambda: refuse_foreign_shards(inputs.module))
    if (
        earlier is not None
        and not inputs.fits
        and not has_unsharded_collections(inputs.module, inputs.settings)
    ):
        updates = {table.full_name: frozen("evaluation only") for table in earlier.tables}
        # An evaluation updates nothing, so the shards of the last fit serve as they are; a fit
        # needs new param groups.
        return _look_up(inputs, earlier, plan_of(earlier, inputs), updates)
    with _unsharded(inputs.module, earlier):
        left_alone = _left_alone_on_a_rank(inputs)
        decisions = inputs.consensus.all_or_none(
            "setup", lambda: _decide(inputs, earlier, left_alone)
        )
        # Before anything is exchanged by table: ranks with other tables would pair the wrong ones.
        counts_ids = _check_same_tables(inputs, decisions.tables)
        for warning in decisions.warnings:
            rank_zero_warn(warning)
            if not decisions.tables:  # in the log, too: many scripts hide all warnings
                rank_zero_info(warning)
        if not decisions.tables:
            return None
        _ = inputs.output_dtype  # raises before anything is sharded; alike on all ranks
        # Ids are counted on all ranks as soon as one rank asks for it: counting is a collective.
        if inputs.fits and counts_ids:
            decisions = replace(decisions, constraints=with_counted_ids(inputs, decisions))
        return _plan_and_shard(inputs, decisions, earlier)


@contextmanager
def _unsharded(root: nn.Module, earlier: ShardedTables | None) -> Iterator[None]:
    """Put the unsharded collections back into the module; on an error, the sharded ones of the
    earlier run again."""
    if earlier is None:
        yield
        return
    with kept_up(root):
        earlier.put_originals_back()
    try:
        yield
    except BaseException:
        earlier.fall_back()
        raise


def _left_alone_on_a_rank(inputs: SetUpInputs) -> dict[str, str]:
    """Collective. Return path -> reason, of what some ranks leave unsharded and others would shard.

    A hook that is registered on one rank is such a reason; wandb's watch, which runs on rank 0,
    registers some.
    """

    def find_left_alone() -> dict[str, str]:
        return find_tables(inputs.module, inputs.settings.conversion).left_alone

    gathered = inputs.consensus.all_gather(inputs.consensus.all_or_none("setup", find_left_alone))
    return {
        path: f"on rank {rank}, {reason}"
        for rank, left_alone in reversed(list(enumerate(gathered)))
        for path, reason in left_alone.items()
        if not all(path in remote for remote in gathered)
    }


def _decide(
    inputs: SetUpInputs, earlier: ShardedTables | None, left_alone: Mapping[str, str]
) -> Decisions:
    selection = select_tables(inputs.module, inputs.settings, left_alone)
    if selection.tables:
        require_kernels(inputs.device)
    if earlier is not None:
        _refuse_to_replicate(inputs, selection, earlier)
    return decide(inputs, selection, {} if earlier is None else earlier.parameters())


def _refuse_to_replicate(
    inputs: SetUpInputs, selection: SelectedTables, earlier: ShardedTables
) -> None:
    """Raise ShardingError where a table of an earlier run would not be sharded now: the module has
    no rows of it."""
    selected = {id(table.original) for table in selection.tables}
    modules = {id(child) for child in inputs.module.modules()}
    for table in earlier.tables:
        if id(table.original) in modules and id(table.original) not in selected:
            raise ShardingError(
                f"'{table.full_name}' was sharded in an earlier run of this module, and "
                "convert_embeddings="
                f"{inputs.settings.conversion.selected!r} or replicated=True would leave it "
                "unsharded now. Keep "
                "convert_embeddings, min_rows and replicated as they were, or load a checkpoint "
                "into a new module."
            )


@without_guards
def _check_same_tables(inputs: SetUpInputs, tables: list[Table]) -> bool:
    """Collective. Raise ShardingError where ranks have different tables; return whether any rank
    counts ids."""
    shapes = [
        (t.full_name, t.config.num_embeddings, t.config.embedding_dim, t.config.feature_names)
        for t in tables
    ]
    local_tables = (shapes, [t.parameter.is_meta for t in tables])
    writes = [written_digest(t.parameter) for t in tables]
    gathered = inputs.consensus.all_gather((
        local_tables,
        writes,
        inputs.settings.planning.estimate_pooling,
    ))
    for rank, (rank_tables, rank_writes, _) in enumerate(gathered):
        if rank_tables != local_tables:
            raise ShardingError(
                f"the ranks have different tables: rank {inputs.consensus.rank} has {shapes}, "
                f"rank {rank} "
                f"{rank_tables[0]}. Build the same module on every rank."
            )
        if rank_writes != writes:
            name = next(
                t.full_name for t, a, b in zip(tables, writes, rank_writes, strict=True) if a != b
            )
            raise ShardingError(
                f"table '{name}' was built without rows, and ranks {inputs.consensus.rank} and "
                f"{rank} wrote other "
                "values to its weight. Each rank makes its own rows: call seed_everything before "
                "the module is built, "
                "or build the table with device='cpu', which takes rank 0's rows."
            )
    return any(num_batches for *_, num_batches in gathered)


def _plan_and_shard(
    inputs: SetUpInputs, decisions: Decisions, earlier: ShardedTables | None
) -> RunTables:
    facts = find_facts(inputs, decisions)
    plan = plan_tables(inputs, decisions, earlier, facts)
    if earlier is None:
        check_start_memory(inputs, decisions.tables, plan)
    # The rows leave the earlier shards before new ones are made, so that a rank never holds both in
    # full.
    rows = {} if earlier is None else earlier.take_rows(decisions.tables)
    if earlier is not None:  # the optimizers of the earlier fit hold shards and momentum
        inputs.trainer.strategy.optimizers, inputs.trainer.strategy.lr_scheduler_configs = [], []
        # Twice: what holds a shard from C++ hides the shard's own cycle from the pass that frees
        # it.
        gc.collect()
        gc.collect()
    with kept_up(inputs.module):
        shards = _shard(
            inputs,
            decisions,
            plan.for_torchrec(facts.devices, inputs.groups.first_rank),
            rows,
            earlier,
        )
    run_tables = _look_up(inputs, shards, plan, decisions.updates)
    _connect(inputs, run_tables, decisions)
    if inputs.fits:
        save_with_logs(inputs.trainer, plan)
    return run_tables


def _shard(
    inputs: SetUpInputs,
    decisions: Decisions,
    plan: ShardingByTable,
    rows: dict[str, list[TableShard]],
    earlier: ShardedTables | None,
) -> ShardedTables:
    """Collective. Shard the tables, and let the optimizers' param groups hold the shards."""
    updates = decisions.updates
    members = members_of(decisions.optimizers)
    optimizers = [*members, *decisions.table_optimizers, *decisions.in_backward.values()]
    # Before the exchange below, after which rank 0 sends its rows: the other ranks of its node have
    # freed theirs.
    rows = rows | _detach_rows(inputs, decisions.tables, optimizers)
    unsharded = {table.full_name: table.parameter for table in decisions.tables}
    fused = {
        name: (update.arguments, update.param_group.label)
        if update.in_backward and update.param_group
        else (NO_UPDATE, "none")
        for name, update in updates.items()
        if plan[name].sharding_type != "data_parallel"
    }
    sharding = TableSharding(
        root=inputs.module,
        tables=decisions.tables,
        plan=plan,
        fused=fused,
        device=inputs.device,
        rows=rows,
        # Rank 0's: rows that no rank has values for are drawn by position, alike whatever the plan.
        seed=inputs.consensus.all_gather(torch.initial_seed())[0],
        comms=inputs.settings.comms,
        gathered={
            name for name, option in decisions.selection.options.items() if option.gathered_weight
        },
        groups=inputs.groups,
        earlier=earlier,
    )
    with without_in_backward(unsharded.values()):
        shards = shard_tables(sharding)
    # In-backward optimizers step in every backward in one process too.
    shards.fused_tables = [
        n for n, update in updates.items() if update.in_backward and n not in decisions.in_backward
    ]
    shards.fill_optimizer_state({
        name: u.initial_state for name, u in updates.items() if u.in_backward
    })
    rows_only = {
        name: _rows_only(update, can_sum_rows(unsharded[name].dtype, inputs.device.type))
        for name, update in updates.items()
        if not update.in_backward
    }
    shards.keep_gradients(rows_only)
    # Only now do the user's optimizers hold shards: configure_optimizers ran on the unsharded
    # parameters, since after sharding their order and number would be others. Fused tables leave
    # the groups, FBGEMM updates them.
    rewrite_groups(optimizers, unsharded, shards.parameters(), updates.keys() - rows_only.keys())
    return shards


def _detach_rows(
    inputs: SetUpInputs, tables: list[Table], optimizers: list[torch.optim.Optimizer]
) -> dict[str, list[TableShard]]:
    """Move the tables to meta, in the optimizers too, and return their rows, which nothing of ours
    refers to then."""
    weights = [table.parameter for table in tables]
    rows = detach_rows(tables, inputs.groups.rank)
    for weight, table in zip(weights, tables, strict=True):
        for optimizer in in_backward_optimizers(weight):
            drop_in_backward_hooks(weight)
            mark_in_backward(table.parameter, optimizer)  # also for a fit after this run
    replace_parameters(
        optimizers, {id(w): t.parameter for w, t in zip(weights, tables, strict=True)}
    )
    return rows


def _connect(inputs: SetUpInputs, run_tables: RunTables, decisions: Decisions) -> None:
    """Let optimizers report their steps, and refuse gradients that fused updates would miss."""
    run_tables.lr_scheduler_configs = decisions.lr_scheduler_configs
    run_tables.connect(decisions.optimizers, decisions.table_optimizers, decisions.in_backward)
    if inputs.fits:
        run_tables.connect_replicas(inputs.consensus)
    for name in run_tables.fused_tables:
        for shard in run_tables.shards.shards[name]:
            # A fused table's weight gets no gradient from lookups. One that arrives is of another
            # use of the weight, which the update inside of backward would miss.
            refuse = partial(_refuse_direct_gradient, name, run_tables.updates)
            shard.weight.register_post_accumulate_grad_hook(refuse)


def _rows_only(update: TableUpdate, sums_rows: bool) -> bool:
    """Whether gradients hold touched rows only; those of a frozen table suit its optimizer, if it
    is unfrozen later."""
    if update.param_group is None:
        return sums_rows
    if update.kind == "frozen":
        return sparse_form(update.param_group, sums_rows)[0] is not None
    return update.kind != "dense"


def _look_up(
    inputs: SetUpInputs, shards: ShardedTables, plan: ShardingPlan, updates: dict[str, TableUpdate]
) -> RunTables:
    """Give the proxies their lookups."""
    settings, consensus = inputs.settings, inputs.consensus
    weight = LossWeight(settings.loss_reduction, consensus, rank_zero_info)
    run_tables = RunTables(
        shards=shards,
        plan=plan,
        updates=updates,
        learning_rates=LearningRates(updates),
        loss_weight=weight,
        automatic=inputs.module.automatic_optimization,
    )
    shards.state.ranks = consensus
    run_tables.undo.callback(setattr, shards.state, "ranks", None)
    learning = any(update.kind != "frozen" for update in updates.values())
    # Bags show how many examples a rank has, which weights ranks with batches of other sizes; ids
    # alone do not.
    only_rows = all(isinstance(table.plain, nn.Embedding) for table in shards.tables)
    fused_optimizers = shards.fused_optimizers()
    for path, sharded in shards.sharded.items():
        tables = shards.tables_of(path)
        names = {table.full_name for table in tables}
        kernels = run_tables.learning_rates.connect({
            n: o for n, o in fused_optimizers.items() if n in names
        })
        uses = {
            table.name: TableUse(
                shards.plan[table.full_name].sharding_type,
                shards.shards[table.full_name][0].weight,
                updates[table.full_name].adds_up,
                updates[table.full_name].in_backward,
                plan.tables[table.full_name].deduplicated,
                updates[table.full_name].takes_unequal_batches,
            )
            for table in tables
        }
        compare: Callable[[int, int, int], None] | None = (
            weight.add_lookup if weight.counts_examples else None
        )
        if compare is not None and isinstance(tables[0].plain, nn.Embedding):
            # The ids of an nn.Embedding may have any shape: their number is not the number of
            # examples.
            compare = weight.add_ids if only_rows and learning else None
        rowless = {
            t.name: t.full_name for t in tables if not shards.shards[t.full_name][0].values.numel()
        }
        lookup = ShardedLookup(
            LookupSetup(
                sharded=sharded,
                tables=tables,
                uses=uses,
                known_keys=shards.known_keys,
                check_ids=settings.check_ids,
                ranks=consensus,
                before_forward=partial(run_tables.learning_rates.push, kernels),
                device=inputs.device,
                output_dtype=inputs.output_dtype,
                compare_examples=compare,
                note_used_tables=partial(shards.note_used_tables, path),
                note_gradients=partial(_note_gradients, shards.state.reached, rowless, updates)
                if rowless
                else None,
                groups=shards.groups,
                mapped=mapped_ids(shards, path, updates),
            )
        )
        shards.proxies[path].lookup = lookup
        run_tables.lookups.append(lookup)
    for lookup in run_tables.lookups_of(shards.fused_tables):
        lookup.update_watch = run_tables.backward_watch
    return run_tables


def _note_gradients(
    reached: set[str],
    rowless: dict[str, str],
    updates: Mapping[str, TableUpdate],
    table: str | None,
) -> None:
    """Note tables whose gradients are kept, and whose rows are all on other ranks. table: one;
    None: all of them."""
    names = rowless.values() if table is None else [rowless[table]] if table in rowless else []
    reached.update([name for name in names if updates[name].kind not in UPDATED_IN_BACKWARD])


def _refuse_direct_gradient(
    name: str, updates: Mapping[str, TableUpdate], weight: torch.Tensor
) -> None:
    # Autograd calls this without a gradient too, in a first step, which may leave some on shards
    # (SummedLookups).
    if weight.grad is None or not updates[name].in_backward:
        return
    weight.grad = None
    raise OptimizerError(
        f"the loss uses the weight of '{name}' itself, not only rows that were looked up (for "
        "example an L2 term or softmax_loss), "
        "which an update inside of backward does not follow. Set embedding_update='sparse' "
        "('dense' for "
        "RowWiseAdagrad), and use lightning_distrec.sharded_l2(table) for sums of squares and "
        "norms; other terms of "
        "the weight are of this rank's shards only. Or build the term from the looked up vectors."
    )
