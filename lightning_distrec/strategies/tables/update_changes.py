"""Tables whose update changes while they train: once unfrozen, or looked up several times.

FBGEMM updates a table once for each lookup: where a step makes several, their gradients must be
summed first. So it is where a loss scores all rows of a table, as softmax_loss does. The first step
shows it. Until it is over, backward can take both ways: through FBGEMM's kernels, or past them to
the shards, on which the user's optimizer steps. The second lookup of a collection, or the loss,
made before backward, decides.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import find_param_group
from lightning_distrec.optimizers.translation import (
    ELEMENTWISE,
    TableUpdate,
    can_sum_rows,
    sparse_form,
    summed_form,
)
from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.tables import Table


class Unfreezing:
    """Chooses the kind of gradient of tables that were frozen at the start, once they are unfrozen.

    updates: full name -> what updates the table since the start. Tables that learn from the start
    can be frozen and unfrozen at any time; their kind of gradient stays.
    """

    def __init__(self, shards: ShardedTables, updates: Mapping[str, TableUpdate]) -> None:
        self._shards = shards
        self._waiting = [name for name, update in updates.items() if update.kind == "frozen"]
        self._lazy = [name for name, update in updates.items() if update.kind == "fused_lazy"]

    def follow(self, optimizers: list[Optimizer]) -> None:
        """Choose the gradients of tables that were unfrozen since the last step; called on every
        rank.

        Raises OptimizerError: the optimizer that a table was given to is not exact on its shards.
        """
        for name in self._lazy:
            if not self._shards.learns(name):
                raise OptimizerError(
                    f"table '{name}' was frozen while training, but fused_lazy Adam still moves "
                    "rows by their momentum. Set embedding_update='auto' for it."
                )
        for name in list(self._waiting):
            if self._shards.learns(name):
                self._begin(name, optimizers)

    def _begin(self, name: str, optimizers: list[Optimizer]) -> None:
        shards = self._shards.shards[name]
        weight = shards[0].weight
        param_group = find_param_group(weight, optimizers)
        if param_group is None:
            return  # no optimizer uses its gradient, which may stay sparse
        self._waiting.remove(name)
        sharding = self._shards.plan[name]
        kind = type(param_group.optimizer)
        has_dense_form = kind in ELEMENTWISE or (
            kind is RowWiseAdagrad and "column" not in sharding.sharding_type
        )
        sparse = sparse_form(param_group, can_sum_rows(weight.dtype, weight.device.type))
        obstacle = sparse if isinstance(sparse, str) else ""
        if (obstacle and not has_dense_form) or sharding.compute_kernel.startswith("fused_uvm"):
            reason = obstacle or (
                f"its kernel is {sharding.compute_kernel}, whose rows an optimizer cannot reach"
            )
            raise OptimizerError(
                f"table '{name}' ({sharding.sharding_type}) was unfrozen and given to "
                f"{kind.__name__}: {reason}. Let it learn from the start of fit, or call fit again "
                "with it unfrozen."
            )
        for shard in shards:
            shard.sparse = not obstacle


class SummedLookups:
    """Follows the lookups of a fit's first step. updates: full name -> what updates the table;
    changed in place.

    num_steps: returns how many steps the optimizer of a table has made. on_change: called with a
    table's name.
    """

    def __init__(
        self,
        shards: ShardedTables,
        updates: dict[str, TableUpdate],
        num_steps: Callable[[str], int],
        on_change: Callable[[str], None],
    ) -> None:
        self._shards = shards
        self._updates = updates
        self._num_steps = num_steps
        self._on_change = on_change
        self.followed: list[tuple[ShardedLookup, set[str], list[Any]]] = []
        """Lookups that the first step may make twice, full names of tables whose updates change
        then, and the handles of hooks on their kernels."""

    def begin(self, lookups: Iterable[ShardedLookup]) -> None:
        """The first step may begin."""
        self._shards.state.before_full_gradient = self._take_full_gradient
        for lookup in lookups:
            tables = self._shards.tables_of(lookup.path)
            fused = [table for table in tables if self._updates[table.full_name].in_backward]
            if not all(map(self._can_be_summed, fused)):
                fused = [table for table in fused if not self._updates[table.full_name].adds_up]
            if fused and all(map(self._can_be_summed, fused)):
                self._follow(lookup, {table.full_name for table in fused})

    def end_first_step(self) -> None:
        """An optimizer has stepped. Where one lookup was made, FBGEMM alone updates the tables from
        now on."""
        for lookup, _, handles in self.followed:
            lookup.second_gradients.on_second = None
            lookup.may_sum_gradients = lookup.sums_gradients
            if not lookup.sums_gradients:
                for handle in handles:
                    handle.remove()
        self.followed = []
        self._shards.state.before_full_gradient = lambda _: None

    def _take_full_gradient(self, name: str) -> None:
        """A gradient of all rows of a table comes in backward."""
        for lookup, names, _ in self.followed:
            if name in names and not lookup.sums_gradients:
                self._sum(lookup, names, "a loss takes the gradient of all of its rows")

    def _can_be_summed(self, table: Table) -> bool:
        update = self._updates[table.full_name]
        kernel = self._shards.plan[table.full_name].compute_kernel
        # An optimizer reaches neither rows in UVM nor, for ids that are evicted, the state of their
        # rows.
        is_reached = table.mapping is None and not kernel.startswith("fused_uvm")
        return is_reached and update.kind == "fused" and not update.is_asked_for

    def _follow(self, lookup: ShardedLookup, names: set[str]) -> None:
        handles = self._shards.keep_gradients_if(names, lambda: lookup.sums_gradients)
        lookup.may_sum_gradients = True
        adds_up = [self._updates[name].adds_up for name in names]
        if not all(adds_up):
            reason = "a step looks it up more than once"
            lookup.second_gradients.on_second = partial(self._sum, lookup, names, reason)
        self.followed.append((lookup, names, handles))

    def _sum(self, lookup: ShardedLookup, names: set[str], reason: str) -> None:
        """Let the user's optimizer step on the tables from this step on, on all ranks: they make
        the same lookups."""
        memory = self._shards.fused_state()
        for name in sorted(names):
            update = self._updates[name]
            shards = self._shards.shards[name]
            weight = shards[0].weight
            sums_rows = can_sum_rows(weight.dtype, weight.device.type)
            self._updates[name] = summed_form(name, update, sums_rows, reason)
            for shard in shards:
                self._bring_state(name, update, shard, memory)
                shard.sparse = self._updates[name].kind == "sparse"
            rank_zero_info(f"table '{name}': {reason}: {self._updates[name].kind} from now on.")
            self._on_change(name)
        lookup.sum_gradients(names)

    def _bring_state(
        self,
        name: str,
        update: TableUpdate,
        shard: LocalShard,
        memory: Mapping[int, list[torch.Tensor]],
    ) -> None:
        """Let the user's optimizer go on with the state that FBGEMM has kept, in its memory."""
        if not update.state_keys:
            return
        # A rank without rows has no kernel. A loss over all rows gives it a gradient, too, and
        # RowWiseAdagrad looks for its state.
        empty = [torch.zeros(0, shard.weight.shape[1])] * len(update.state_keys)
        values = memory.get(id(shard), empty)
        assert update.param_group is not None
        state = {"step": torch.tensor(float(self._num_steps(name)))}
        for (key, per_row), value in zip(update.state_keys, values, strict=True):
            columns = value.detach().view(-1, 1) if per_row else value.detach()
            state[key] = columns.to(shard.weight.dtype)
        update.param_group.optimizer.state[shard.weight] = state
