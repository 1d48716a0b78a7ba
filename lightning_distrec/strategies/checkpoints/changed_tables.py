"""Which rows of tables may have changed since a moment: those that were looked up, or all of a
table, and why.

Who writes rows:

- FBGEMM inside of backward: rows that get a gradient (TouchedRows).
- The user's optimizer, sparse: rows that get a gradient, by optimizers that move no others.
- The user's optimizer, dense: all rows.
- Anything else (callbacks, user code, loading): all rows. torch counts writes into a tensor
  (`_version`), and FBGEMM's are not among them. Those of optimizers are taken out here, and those
  through `.data`, which torch does not count, are in `writes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_distrec._compat.lightning import call_after_closure
from lightning_distrec._compat.torch import versions_of, without_torch_function
from lightning_distrec.strategies.checkpoints.table_states import SavedTables

if TYPE_CHECKING:  # it loads torchrec, which modules without tables do not need
    from lightning_distrec.sharding.row_gradients import LocalShard


class ChangedTables:
    """Follows writes into a fit's tables and their optimizers' state. plugin: of precision, whose
    closures step."""

    def __init__(self, tables: SavedTables, plugin: Any) -> None:
        from lightning_distrec.sharding.lookup.touched_rows import TouchedRows

        self.tables = tables
        self._writes = tables.shards.state.writes
        # FBGEMM's kernels count no versions: rows are noted as they get gradients.
        self._touched = TouchedRows(tables.shards.kernels)
        self._undo: list[Callable[[], None]] = [self._touched.release]
        self._fused_state = tables.shards.fused_state()
        self._written = {
            name: _Writes(partial(self.table_memory, name)) for name in tables.shards.shards
        }
        for optimizer in tables.all_optimizers:
            self._undo.append(optimizer.register_step_pre_hook(self._before_update).remove)
            self._undo.append(optimizer.register_step_post_hook(self._after_update).remove)
        # The pre-hook comes before the closure, in which Lightning runs forward and backward: what
        # user hooks write there is looked at after it.
        self._undo.append(call_after_closure(plugin, self._before_update).close)
        self.begin()

    @property
    def _unfused(self) -> list[str]:
        """Tables whose gradients are left to the user's optimizers; after the first step there may
        be more."""
        names = []
        for name, update in self.tables.updates.items():
            if not update.in_backward and not self._shards(name)[0].replicated:
                names.append(name)
        return names

    def begin(self) -> None:
        """Forget what has changed so far."""
        self._touched.clear()
        # Not now: gradients stay until they are set to zero, also those that were used.
        self._notes_gradients = True
        # A copy, since the counts themselves go on.
        self._written_by_user = dict(self._writes)
        for written in self._written.values():
            written.begin()

    def release(self) -> None:
        """Stop following."""
        # Popped, so that a second call does nothing; the last patch is undone first.
        while self._undo:
            self._undo.pop()()

    def ids_of(self, shard: LocalShard) -> Tensor:
        """Return the rows of a shard that may have changed, counted from its first; not of tables
        in `in_full`."""
        return self._touched.ids_of(shard)

    def in_full(self) -> dict[str, str]:
        """Return full name of a table of which all rows may have changed on this rank -> why."""
        reasons = {name: self._reason(name) for name in self._written}
        return {name: reason for name, reason in reasons.items() if reason}

    def _reason(self, name: str) -> str:
        if self._shards(name)[0].replicated:
            return "every rank has all of it"
        reason = self._moves_all(name) if name in self._unfused else ""
        if reason:
            return reason
        is_written = self._written[name].look()
        if is_written or self._writes[name] != self._written_by_user.get(name, 0):
            return "something besides its optimizer has written its rows, a callback for example"
        return ""

    def table_memory(self, name: str) -> list[Tensor]:
        """Return what this rank has of a table: its weights and its optimizer's state."""
        memory: list[Tensor] = []
        for shard in self._shards(name):
            memory.append(shard.weight)
            memory += self._fused_state.get(id(shard), [])
            if name not in self._unfused:
                continue
            for optimizer in self.tables.all_optimizers:
                state = optimizer.state.get(shard.weight, {})
                memory += [value for value in state.values() if isinstance(value, Tensor)]
        return memory

    def _shards(self, name: str) -> list[LocalShard]:
        return self.tables.shards.shards[name]

    def _moves_all(self, name: str) -> str:
        """Return why the user's optimizer may move all rows of a table; "" if it does not."""
        from lightning_distrec.optimizers.param_groups import find_param_group
        from lightning_distrec.optimizers.translation import TableUpdate, sparse_form

        shards = self._shards(name)
        group = find_param_group(shards[0].weight, self.tables.all_optimizers)
        if group is None or not self.tables.shards.learns(name):
            return "" if all(shard.sparse for shard in shards) else "it was updated densely"
        if isinstance(sparse_form(group), TableUpdate) and all(shard.sparse for shard in shards):
            return ""
        return f"{type(group.optimizer).__name__} moves all of its rows"

    def _before_update(self, *_: Any) -> None:
        if self._notes_gradients:
            self._touched.note_gradients()
            self._notes_gradients = False
        for name in self._unfused:
            self._written[name].look()

    def _after_update(self, *_: Any) -> None:
        for name in self._unfused:
            self._written[name].accept()


class _Writes:
    """Whether anything but updates has written into some tensors. memory: returns them, as they are
    now."""

    def __init__(self, memory: Callable[[], list[Tensor]]) -> None:
        self._memory = memory
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._is_written = False

    def begin(self) -> None:
        """Forget all writes so far."""
        self._is_written = False
        self.accept()

    def look(self) -> bool:
        """Return whether there was a write since `begin` that was not forgiven."""
        with without_torch_function():
            if not self._is_written:
                tensors = self._memory()
                # `_version` counts in-place writes into one tensor; that a tensor was replaced
                # shows in its identity.
                are_same = len(tensors) == len(self._tensors) and all(
                    map(is_, tensors, self._tensors)
                )
                self._is_written = not are_same or versions_of(tensors) != self._versions
            return self._is_written

    def accept(self) -> None:
        """Take no notice of writes since the last look: an update has made them."""
        with without_torch_function():
            self._tensors = self._memory()
            self._versions = versions_of(self._tensors)
