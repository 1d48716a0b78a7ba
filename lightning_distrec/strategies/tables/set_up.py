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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_distrec._compat.torch import (
    drop_in_backward_hooks,
    in_backward_optimizers,
    mark_in_backward,
    without_in_backward,
)
from lightning_distrec.errors import ShardingError
from lightning_distrec.gpu import require_kernels
from lightning_distrec.kept_parameters import kept_up
from lightning_distrec.optimizers.param_groups import replace_parameters, rewrite_groups
from lightning_distrec.optimizers.torchrec_optimizers import members_of
from lightning_distrec.optimizers.translation import (
    NO_UPDATE,
    TableUpdate,
    can_sum_rows,
    frozen,
    sparse_form,
)
from lightning_distrec.sharding.initial_weights import TableShard
from lightning_distrec.sharding.meta_weight import written_digest
from lightning_distrec.sharding.shard_tables import TableSharding, detach_rows
from lightning_distrec.sharding.sharded_tables import (
    ShardedTables,
    refuse_foreign_shards,
    sharded_tables_of,
)
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.tables import Table, find_tables
from lightning_distrec.sharding.weights.shard_access import without_guards
from lightning_distrec.strategies.tables.cluster_facts import check_start_memory, find_facts
from lightning_distrec.strategies.tables.connect import connect, look_up
from lightning_distrec.strategies.tables.decisions import (
    decide,
    has_unsharded_collections,
    select_tables,
)
from lightning_distrec.strategies.tables.first_step import estimate_by_first_step
from lightning_distrec.strategies.tables.plan_of_run import (
    plan_of,
    plan_tables,
    save_with_logs,
    with_counted_ids,
)
from lightning_distrec.strategies.tables.run_tables import RunTables
from lightning_distrec.strategies.tables.set_up_inputs import (
    Decisions,
    SetUpInputs,
    with_batch_size,
)


def set_up_tables(inputs: SetUpInputs) -> RunTables | None:
    """Collective. Shard the module's tables and return them; None where it has none."""
    module = inputs.module
    settings = inputs.settings
    consensus = inputs.consensus
    earlier = sharded_tables_of(module)
    # Whatever may raise on one rank alone goes through all_or_none: the others would wait in the
    # next collective.
    consensus.all_or_none("setup", lambda: refuse_foreign_shards(module))
    # For fit, tables that an earlier run sharded are sharded again: the optimizers are new, and so
    # is their state. An evaluation updates nothing, so that they serve as they are.
    if inputs.fits:
        inputs = replace(inputs, settings=with_batch_size(settings, inputs.trainer, module))
    elif earlier is not None and not has_unsharded_collections(module, settings):
        updates = {table.full_name: frozen("evaluation only") for table in earlier.tables}
        return look_up(inputs, earlier, plan_of(earlier, inputs), updates)
    with _unsharded(module, earlier):
        left_alone = _left_alone_on_a_rank(inputs)
        decisions = consensus.all_or_none("setup", lambda: _decide(inputs, earlier, left_alone))
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
            decisions = decisions.with_constraints(with_counted_ids(inputs, decisions))
        facts = find_facts(inputs, decisions)
        plan = plan_tables(inputs, decisions, earlier, facts)
        if earlier is None:
            check_start_memory(inputs, decisions.tables, plan)
        devices_plan = plan.for_torchrec(facts.devices, inputs.groups.first_rank)
        shards = _shard(inputs, decisions, devices_plan, earlier)
        run_tables = look_up(inputs, shards, plan, decisions.updates)
        connect(inputs, run_tables, decisions)
        if inputs.fits:
            save_with_logs(inputs.trainer, plan)
            if consensus.rank == 0 and plan.num_ranks > 1 and decisions.with_assumed_ids:
                run_tables.undo.enter_context(estimate_by_first_step(inputs, run_tables))
        return run_tables


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
    on_all_ranks = set.intersection(*map(set, gathered))
    reasons: dict[str, str] = {}
    for rank, left_alone in enumerate(gathered):
        for path, reason in left_alone.items():
            if path not in on_all_ranks:
                reasons.setdefault(path, f"on rank {rank}, {reason}")
    return reasons


def _decide(
    inputs: SetUpInputs, earlier: ShardedTables | None, left_alone: Mapping[str, str]
) -> Decisions:
    decisions = select_tables(inputs.module, inputs.settings, left_alone)
    if decisions.tables:
        require_kernels(inputs.device)
    if earlier is not None:
        _refuse_to_replicate(inputs, decisions, earlier)
    decide(inputs, decisions, {} if earlier is None else earlier.parameters())
    return decisions


def _refuse_to_replicate(inputs: SetUpInputs, decisions: Decisions, earlier: ShardedTables) -> None:
    """Raise ShardingError where a table of an earlier run would not be sharded now: the module has
    no rows of it."""
    selected = {id(table.original) for table in decisions.tables}
    in_module = set(map(id, inputs.module.modules()))
    for table in earlier.tables:
        if id(table.original) in in_module - selected:
            raise ShardingError(
                f"'{table.full_name}' was sharded in an earlier run of this module, and "
                f"convert_embeddings={inputs.settings.conversion.selected!r} or replicated=True "
                "would leave it unsharded now. Keep convert_embeddings, min_rows and replicated as "
                "they were, or load a checkpoint into a new module."
            )


@without_guards
def _check_same_tables(inputs: SetUpInputs, tables: list[Table]) -> bool:
    """Collective. Raise ShardingError where ranks have different tables; return whether any rank
    counts ids."""
    ranks = inputs.consensus
    names = [table.full_name for table in tables]
    shapes = []
    are_meta = []
    writes = []
    for table in tables:
        config = table.config
        sizes = (config.num_embeddings, config.embedding_dim, config.feature_names)
        shapes.append((table.full_name, *sizes))
        are_meta.append(table.parameter.is_meta)
        writes.append(written_digest(table.parameter))
    counts_ids = inputs.settings.planning.estimate_pooling
    gathered = ranks.all_gather(((shapes, are_meta), writes, counts_ids))
    for rank, (rank_tables, rank_writes, rank_counts_ids) in enumerate(gathered):
        counts_ids = counts_ids or rank_counts_ids
        if rank_tables != (shapes, are_meta):
            raise ShardingError(
                f"the ranks have different tables: rank {ranks.rank} has {shapes}, rank {rank} "
                f"{rank_tables[0]}. Build the same module on every rank."
            )
        if rank_writes != writes:
            differ = [a != b for a, b in zip(writes, rank_writes, strict=True)]
            raise ShardingError(
                f"table '{names[differ.index(True)]}' was built without rows, and ranks "
                f"{ranks.rank} and {rank} wrote other values to its weight. Each rank makes its "
                "own rows: call seed_everything before the module is built, or build the table "
                "with device='cpu', which takes rank 0's rows."
            )
    return bool(counts_ids)


def _shard(
    inputs: SetUpInputs, decisions: Decisions, plan: ShardingByTable, earlier: ShardedTables | None
) -> ShardedTables:
    """Collective. Shard the tables, and let the optimizers' param groups hold the shards."""
    rows: dict[str, list[TableShard]] = {}
    if earlier is not None:
        # The rows leave the earlier shards before new ones are made, so that a rank never holds
        # both in full.
        rows = earlier.take_rows(decisions.tables)
        # The optimizers of the earlier fit hold shards and momentum.
        inputs.trainer.strategy.optimizers = []
        inputs.trainer.strategy.lr_scheduler_configs = []
        # Twice: what holds a shard from C++ hides the shard's own cycle from the pass that frees
        # it.
        gc.collect()
        gc.collect()
    members = members_of(decisions.optimizers)
    optimizers = [*members, *decisions.table_optimizers, *decisions.in_backward.values()]
    with kept_up(inputs.module):
        # Before the exchange below, after which rank 0 sends its rows: the other ranks of its node
        # have freed theirs.
        rows |= _detach_rows(inputs, decisions.tables, optimizers)
        unsharded = {table.full_name: table.parameter for table in decisions.tables}
        fused = {}
        gathered = set()
        for record in decisions.records:
            update = record.update
            if plan[record.name].sharding_type != "data_parallel":
                fused[record.name] = (NO_UPDATE, "none")
                if update.in_backward and update.param_group:
                    fused[record.name] = (update.arguments, update.param_group.label)
            if record.options.gathered_weight:
                gathered.add(record.name)
        sharding = TableSharding(
            root=inputs.module,
            tables=decisions.tables,
            plan=plan,
            fused=fused,
            device=inputs.device,
            rows=rows,
            # Rank 0's: rows that no rank has values for are drawn by position, alike whatever the
            # plan.
            seed=inputs.consensus.all_gather(torch.initial_seed())[0],
            comms=inputs.settings.comms,
            gathered=gathered,
            groups=inputs.groups,
            earlier=earlier,
        )
        with without_in_backward(unsharded.values()):
            shards = sharding.shard()
        rows_only = {}
        initial_states = {}
        for record in decisions.records:
            update = record.update
            dtype = unsharded[record.name].dtype
            if not update.in_backward:
                rows_only[record.name] = _rows_only(update, can_sum_rows(dtype, inputs.device.type))
                continue
            initial_states[record.name] = update.initial_state
            # In-backward optimizers step in every backward in one process too.
            if record.in_backward is None:
                shards.fused_tables.append(record.name)
        shards.fill_optimizer_state(initial_states)
        shards.keep_gradients(rows_only)
        # Only now do the user's optimizers hold shards: configure_optimizers ran on the unsharded
        # parameters, since after sharding their order and number would be others. Fused tables
        # leave the groups, FBGEMM updates them.
        rewrite_groups(optimizers, unsharded, shards.parameters(), initial_states.keys())
    return shards


def _detach_rows(
    inputs: SetUpInputs, tables: list[Table], optimizers: list[torch.optim.Optimizer]
) -> dict[str, list[TableShard]]:
    """Move the tables to meta, in the optimizers too, and return their rows, which nothing of ours
    refers to then."""
    weights = [table.parameter for table in tables]
    rows = detach_rows(tables, inputs.groups.rank)
    replaced = {}
    for weight, table in zip(weights, tables, strict=True):
        replaced[id(weight)] = table.parameter
        for optimizer in in_backward_optimizers(weight):
            drop_in_backward_hooks(weight)
            mark_in_backward(table.parameter, optimizer)  # also for a fit after this run
    replace_parameters(optimizers, replaced)
    return rows


def _rows_only(update: TableUpdate, sums_rows: bool) -> bool:
    """Whether gradients hold touched rows only; those of a frozen table suit its optimizer, if it
    is unfrozen later."""
    if update.param_group is None:
        return sums_rows
    if update.kind == "frozen":
        return isinstance(sparse_form(update.param_group, sums_rows), TableUpdate)
    return update.kind != "dense"
