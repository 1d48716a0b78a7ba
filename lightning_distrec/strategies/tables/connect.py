"""Connects sharded tables with a run: proxies get lookups, and optimizers report their steps."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.translation import (
    UPDATED_IN_BACKWARD,
    LearningRates,
    TableUpdate,
)
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup, TableUse
from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.data_parallel.losses import LossWeight
from lightning_distrec.strategies.tables.mapped_tables import mapped_ids
from lightning_distrec.strategies.tables.run_tables import RunTables
from lightning_distrec.strategies.tables.set_up_inputs import Decisions, SetUpInputs


def look_up(
    inputs: SetUpInputs, shards: ShardedTables, plan: ShardingPlan, updates: dict[str, TableUpdate]
) -> RunTables:
    """Give the proxies their lookups."""
    run_tables = RunTables(
        shards=shards,
        plan=plan,
        updates=updates,
        learning_rates=LearningRates(updates),
        loss_weight=LossWeight(inputs.settings.loss_reduction, inputs.consensus, rank_zero_info),
        automatic=inputs.module.automatic_optimization,
    )
    shards.state.ranks = inputs.consensus
    run_tables.undo.callback(setattr, shards.state, "ranks", None)
    for path in shards.sharded:
        lookup = ShardedLookup(_lookup_setup(inputs, run_tables, path))
        shards.proxies[path].lookup = lookup
        run_tables.lookups.append(lookup)
    for lookup in run_tables.lookups_of(shards.fused_tables):
        lookup.update_watch = run_tables.backward_watch
    return run_tables


def _lookup_setup(inputs: SetUpInputs, run_tables: RunTables, path: str) -> LookupSetup:
    """Return what the lookup of the collection at `path` is made of."""
    shards = run_tables.shards
    updates = run_tables.updates
    tables = shards.tables_of(path)
    uses = {}
    rowless = {}
    fused_optimizers = {}
    all_fused_optimizers = shards.fused_optimizers()
    for table in tables:
        name = table.full_name
        first_shard = shards.shards[name][0]
        update = updates[name]
        uses[table.name] = TableUse(
            shards.plan[name].sharding_type,
            first_shard.weight,
            update.adds_up,
            update.in_backward,
            run_tables.plan.tables[name].deduplicated,
            update.takes_unequal_batches,
        )
        if not first_shard.values.numel():
            rowless[table.name] = name
        if name in all_fused_optimizers:
            fused_optimizers[name] = all_fused_optimizers[name]
    kernels = run_tables.learning_rates.connect(fused_optimizers)
    note_gradients = None
    if rowless:
        note_gradients = partial(_note_gradients, shards.state.reached, rowless, updates)
    return LookupSetup(
        sharded=shards.sharded[path],
        tables=tables,
        uses=uses,
        known_keys=shards.known_keys,
        check_ids=inputs.settings.check_ids,
        ranks=inputs.consensus,
        before_forward=partial(run_tables.learning_rates.push, kernels),
        device=inputs.device,
        output_dtype=inputs.output_dtype,
        compare_examples=_comparison(run_tables, tables[0]),
        note_used_tables=partial(shards.note_used_tables, path),
        note_gradients=note_gradients,
        groups=shards.groups,
        mapped=mapped_ids(shards, path, updates),
    )


def _comparison(run_tables: RunTables, table: Table) -> Callable[[int, int, int], None] | None:
    """Return what compares the ranks' numbers of examples, by lookups of the table; or None."""
    weight = run_tables.loss_weight
    if not weight.counts_examples:
        return None
    if not isinstance(table.plain, nn.Embedding):
        return weight.add_lookup
    # The ids of an nn.Embedding may have any shape: their number is not the number of examples.
    # Bags show that, which weights ranks with batches of other sizes.
    only_rows = all(isinstance(t.plain, nn.Embedding) for t in run_tables.shards.tables)
    learning = any(update.kind != "frozen" for update in run_tables.updates.values())
    return weight.add_ids if only_rows and learning else None


def _note_gradients(
    reached: set[str],
    rowless: dict[str, str],
    updates: Mapping[str, TableUpdate],
    table: str | None,
) -> None:
    """Note tables whose gradients are kept, and whose rows are all on other ranks.

    table: one; None: all of them.
    """
    for name, full_name in rowless.items():
        if table in (None, name) and updates[full_name].kind not in UPDATED_IN_BACKWARD:
            reached.add(full_name)


def connect(inputs: SetUpInputs, run_tables: RunTables, decisions: Decisions) -> None:
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
        "example an L2 term or softmax_loss), which an update inside of backward does not follow. "
        "Set embedding_update='sparse' ('dense' for RowWiseAdagrad), and use "
        "lightning_distrec.sharded_l2(table) for sums of squares and norms; other terms of the "
        "weight are of this rank's shards only. Or build the term from the looked up vectors."
    )
