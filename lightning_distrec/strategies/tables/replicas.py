"""Groups of ranks with a replica of the tables each: what is refused, and what keeps replicas equal
in a fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim import Optimizer

from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.param_groups import find_param_group
from lightning_distrec.optimizers.translation import TableUpdate
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.touched_rows import TouchedRows
from lightning_distrec.sharding.replica_exchange import (
    average_gradients,
    average_rows,
    union_of_rows,
)
from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.sharding_groups import (
    ShardingGroupOptions,
    ShardingGroups,
    do_nothing,
)
from lightning_distrec.sharding.weights.shard_access import rewriting, without_guards
from lightning_distrec.strategies.tables.set_up_inputs import TableRecord

Updates = Mapping[str, TableUpdate]
"""Full name of a table -> what updates it."""


class Replicas:
    """The replicas of a fit, which are equal after `synchronize`; each kind acts at some of these
    places in a step."""

    def before_training_step(self) -> None:
        """Do nothing."""

    def after_backward(self) -> None:
        """Do nothing."""

    def after_optimizer_step(self) -> None:
        """Do nothing."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside of the context, gradients stay on their rank, and a later backward exchanges their
        sum."""
        return nullcontext()

    def release(self) -> None:
        """Do nothing at the end of the fit."""


class ExchangedGradients(Replicas):
    """Averages the gradients of rows over the groups after each backward, as DDP does those of
    other layers."""

    def __init__(self, tables: ShardedTables) -> None:
        shards = [shard for shards in tables.shards.values() for shard in shards]
        self._weights = [shard.weight for shard in shards if shard.values.numel()]
        self._group = tables.groups.replicas
        self._waits = False

    @without_guards
    def after_backward(self) -> None:
        """Collective. Average the gradients, unless more are to come before the update."""
        # Under accumulation the sum of gradients is averaged once, which is the same mean with
        # fewer exchanges.
        if not self._waits:
            average_gradients(self._weights, self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False


class AveragedRows(Replicas):
    """Averages what any group has touched, weights and optimizer state, at every sync_interval-th
    step.

    optimizers: returns those that step. Counts of steps in their state become the largest of the
    groups.
    """

    def __init__(
        self,
        tables: ShardedTables,
        updates: Updates,
        optimizers: Callable[[], list[Optimizer]],
        ranks: Ranks,
    ) -> None:
        self._tables = tables
        self._updates = updates
        self._optimizers = optimizers
        self._ranks = ranks
        self._group = tables.groups.replicas
        self._interval = tables.groups.sync_interval
        self._touched = TouchedRows(tables.kernels)
        self._has_stepped = False
        self._num_steps = 0
        self._frozen = [name for name, update in updates.items() if update.kind == "frozen"]
        self._unfrozen: set[str] = set()
        """Those of them that have learned since the last time."""
        # Checkpoints, evaluation and full weights ask the tables, which know no strategy, for equal
        # replicas.
        tables.synchronize = self.synchronize

    def before_training_step(self) -> None:
        """Collective where it is due: the steps since the last time are as many as the interval."""
        self._count()
        if self._num_steps >= self._interval:
            self.synchronize()
        self._unfrozen.update(filter(self._tables.learns, self._frozen))

    def after_optimizer_step(self) -> None:
        """Note that rows have changed in this training step."""
        self._has_stepped = True

    def _count(self) -> None:
        # Once a training step, however many optimizers have stepped in it.
        self._num_steps += self._has_stepped
        self._has_stepped = False

    @without_guards
    def synchronize(self) -> None:
        """Collective where steps were made since the last time. Make the replicas equal now."""
        self._count()
        if not self._num_steps:
            return
        self._num_steps = 0
        with rewriting(), torch.no_grad():
            self._average()
        self._touched.clear()
        self._touched.note_gradients()
        self._unfrozen.clear()

    def release(self) -> None:
        """Stop noting rows."""
        self._touched.release()
        self._tables.synchronize = do_nothing

    def _average(self) -> None:
        shards = []
        by_rows = []
        for name, table_shards in self._tables.shards.items():
            update = self._updates[name]
            if update.kind == "frozen" and name not in self._unfrozen:
                continue
            for shard in table_shards:
                if shard.values.numel():
                    shards.append(shard)
                    by_rows.append(update.in_backward or shard.sparse)
        # On ranks without shards too: which state exists is agreed on by all ranks.
        states = self._states(shards)
        if not shards:
            # All replicas of this rank's shards have the same ones, so none of them waits in the
            # collectives below.
            return
        # One exchange for all shards: their rows are numbered one after the other.
        sizes = [len(shard.values) for shard in shards]
        firsts = [0, *accumulate(sizes)]
        touched = []
        for shard, first, is_by_rows in zip(shards, firsts, by_rows, strict=False):
            if is_by_rows:
                touched.append(self._touched.ids_of(shard).to(shard.weight.device) + first)
        union = torch.empty(0, dtype=torch.long)
        if touched:
            union = union_of_rows(torch.cat(touched), self._group)
        ends = torch.searchsorted(union, torch.tensor(firsts, device=union.device)).tolist()
        for i, shard in enumerate(shards):
            rows = union[ends[i] : ends[i + 1]] - firsts[i] if by_rows[i] else None
            average_rows([shard.weight, *states[i]], rows, self._group)

    def _states(self, shards: list[LocalShard]) -> list[list[Tensor]]:
        """Collective over all ranks. Return the optimizer state of each shard that lies along its
        rows."""
        fused = self._tables.fused_state()
        optimizers = self._optimizers()
        row_states = [list(fused.get(id(shard), ())) for shard in shards]
        optimizer_of: dict[int, Optimizer] = {}
        local_widths = []
        for i, shard in enumerate(shards):
            group = find_param_group(shard.weight, optimizers)
            if group is not None and id(shard) not in fused:
                optimizer_of[i] = group.optimizer
                state = group.optimizer.state.get(shard.weight, {})
                local_widths.append((i, _widths(shard, state)))
        rank_widths = self._ranks.all_gather(local_widths)
        replicas = self._tables.groups.same_shards(self._ranks.rank)
        counts: list[tuple[dict[str, Any], str]] = []
        for i, optimizer in optimizer_of.items():
            weight = shards[i].weight
            state = optimizer.state.get(weight, {})
            widths: dict[str, int] = {}
            for rank in replicas:
                widths |= dict(dict(rank_widths[rank])[i])
            for key, width in widths.items():
                # A group in which no step has given a table a gradient may have no state of it yet;
                # it gets zeros.
                if key not in state:
                    state[key] = weight.new_zeros(_shape(weight, width), dtype=torch.float32)
                if width >= 0:
                    row_states[i].append(state[key])
                else:
                    counts.append((state, key))
            if state:
                optimizer.state[weight] = state
        self._use_largest(counts)
        return row_states

    def _use_largest(self, counts: list[tuple[dict[str, Any], str]]) -> None:
        """Collective among replicas. Set each count of steps to the largest that a replica has."""
        if not counts:
            return
        device = next(shards[0].weight.device for shards in self._tables.shards.values())
        values = [float(state[key]) for state, key in counts]
        numbers = torch.tensor(values, dtype=torch.float32, device=device)
        # A group whose tables had no gradient may have stepped less often; Adam's bias correction
        # would differ.
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        for (state, key), number in zip(counts, numbers.tolist(), strict=True):
            if isinstance(state[key], Tensor):
                state[key].fill_(number)
            else:
                state[key] = type(state[key])(number)


def _shape(weight: Tensor, width: int) -> tuple[int, ...]:
    """Return the shape of a state of a shard. width: see `_widths`."""
    if width < 0:
        return ()
    return (len(weight), width) if width else (len(weight),)


def _widths(shard: LocalShard, state: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return key -> columns of the state of one shard: 0 for one number per row, -1 for one number
    in all."""
    widths = []
    for key, value in state.items():
        along = isinstance(value, Tensor) and value.dim() and len(value) == len(shard.values)
        if along:
            widths.append((key, value.shape[1] if value.dim() > 1 else 0))
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            widths.append((key, -1))
    return widths


AVERAGES = (StochasticWeightAveraging, WeightAveraging)


def why_kept(groups: ShardingGroups | ShardingGroupOptions) -> str:
    """Return why the gradients of tables must be kept for the optimizers; "" where they need
    not."""
    return "sharding_groups exchange gradients" if groups.exchanges_gradients else ""


def warn_of_replicas(groups: ShardingGroups) -> list[str]:
    """Return the warning that the tables are not those of one process."""
    if groups.num_replicas == 1 or groups.exchanges_gradients:
        return []
    return [
        f"sharding_groups: sync_interval={groups.sync_interval} is not exact. Each of "
        f"{groups.num_replicas} groups updates its replica of the tables by its own batches, and "
        f"the rows that they have touched are averaged once in {groups.sync_interval} steps. "
        "sync_interval=1 has the numbers of one process."
    ]


def refuse_with_groups(
    groups: ShardingGroups,
    records: list[TableRecord],
    callbacks: Iterable[Callback],
) -> None:
    """Raise ConfigError where a table's options, or a callback, do not go together with the
    groups."""
    if groups.num_replicas == 1:
        return
    fused = [record.name for record in records if record.update.in_backward]
    if groups.exchanges_gradients and fused:
        raise ConfigError(
            f"table '{fused[0]}' is updated inside of backward, because embedding_update asks for "
            "it, but with sharding_groups and sync_interval=1 the groups exchange gradients before "
            "the update. Set embedding_update='auto', or a larger sync_interval, which is not "
            "exact."
        )
    gathered = [record.name for record in records if record.options.gathered_weight]
    if gathered and not groups.exchanges_gradients:
        raise ConfigError(
            f"table '{gathered[0]}' has gathered_weight=True, but with "
            f"sync_interval={groups.sync_interval} each group has other weights. Set "
            "sync_interval=1, or replicated=True for the table."
        )
    averages = [type(callback).__name__ for callback in callbacks if isinstance(callback, AVERAGES)]
    if averages and not groups.exchanges_gradients:
        raise ConfigError(
            f"the callback {averages[0]} averages weights of which each group has others at "
            f"sync_interval={groups.sync_interval}, so that groups would have other averages. Set "
            "sync_interval=1, or remove it."
        )


def refuse_with_checkpoints(groups: ShardingGroupOptions, checkpoint: CheckpointOptions) -> None:
    """Raise ConfigError where checkpoints take what each rank has, and replicas would be missed or
    saved twice."""
    if groups.size is not None and checkpoint.incremental is not None:
        raise ConfigError(
            "sharding_groups does not go together with checkpoint={'incremental': ...}, which "
            "follows the rows of each rank and knows of no replicas. Remove one of them."
        )
