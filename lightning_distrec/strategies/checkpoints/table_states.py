"""The optimizer state of sharded tables as checkpoints hold it: along the full table, by element,
row or column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.chunks import Box, Chunk, ChunkedTensor
from lightning_distrec.errors import CheckpointError
from lightning_distrec.sharding.weights.shard_access import without_guards

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.optimizers.translation import TableUpdate
    from lightning_distrec.sharding.row_gradients import LocalShard
    from lightning_distrec.sharding.sharded_tables import ShardedTables
    from lightning_distrec.sharding.tables import Table


Description = tuple[tuple[int, ...] | None, Any]
"""Of a value in an optimizer's state: a tensor's shape along the full table, and its type; None and
the value itself for numbers."""


class SavedTables(Protocol):
    """The sharded tables of a run, with what updates them."""

    shards: ShardedTables
    updates: dict[str, TableUpdate]
    """By full name of a table."""
    all_optimizers: list[Optimizer]
    """Those of configure_optimizers, and those of tables alone."""

    @property
    def own_optimizers(self) -> list[Optimizer]:
        """Those of tables alone."""

    def plan_files(self) -> dict[str, bytes]:
        """Return name -> content of the files that a checkpoint has about the plan."""

    def num_fused_steps(self, name: str) -> int:
        """Return how often the optimizer of a table that is updated inside of backward has
        stepped."""

    def set_fused_steps(self, name: str, num_steps: int) -> None:
        """Continue counting the steps of a table's optimizer from here."""


class SavedTable(NamedTuple):
    """A table, this rank's shards of it, and the tables of its run."""

    table: Table
    shards: list[LocalShard]
    tables: SavedTables
    grow: bool
    """Whether to accept more rows than were saved."""

    @property
    def update(self) -> TableUpdate:
        """What updates the table."""
        return self.tables.updates[self.table.full_name]

    @without_guards
    def describe_state(self, optimizer: Optimizer) -> dict[str, Description] | None:
        """Return each key's description; None if this rank has no rows."""
        shards = [shard for shard in self.shards if shard.values.numel()]
        if not shards:
            return None
        shard = shards[0]
        described: dict[str, Description] = {}
        num_rows, dim = self._size()
        full_shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for full_shape in ((num_rows, dim), (num_rows, 1), (num_rows,)):
            _, shape = self._box(shard, full_shape)
            full_shapes[shape] = full_shape
        for key, value in optimizer.state.get(shard.weight, {}).items():
            if not isinstance(value, Tensor):
                described[key] = (None, value)
            elif value.dim() == 0:
                described[key] = (None, value.cpu())
            elif tuple(value.shape) in full_shapes:
                described[key] = (full_shapes[tuple(value.shape)], value.dtype)
            else:
                rows, columns = shard.values.shape
                raise CheckpointError(
                    f"table '{shard.table}': {class_name(optimizer)} keeps '{key}' of shape "
                    f"{tuple(value.shape)} for a shard of {rows} x {columns}, which cannot be "
                    "saved by the row. Save with save_weights_only=True, or give the table another "
                    "optimizer."
                )
        return described

    @without_guards
    def collect_value(self, key: str, description: Description, optimizer: Optimizer) -> Any:
        """Return a value of torch's state for the full table. description: see `describe_state`,
        the same on ranks."""
        shape, dtype_or_value = description
        if shape is None:
            return dtype_or_value
        # Every rank has all of it: a plain tensor, whose rows are divided among ranks for writing.
        if self.shards[0].replicated:
            return optimizer.state[self.shards[0].weight][key].detach()
        chunks = []
        for shard in self._saved_shards():
            offsets, _ = self._box(shard, shape)
            chunks.append(Chunk(offsets, optimizer.state[shard.weight][key].detach()))
        return ChunkedTensor(shape, dtype_or_value, chunks)

    def collect_fused(self) -> dict[str, Any]:
        """Return the state that FBGEMM keeps of the table."""
        state: dict[str, Any] = {}
        memory = self.tables.shards.fused_state()
        num_rows, dim = self._size()
        for i, (key, per_row) in enumerate(self.update.state_keys):
            shape = (num_rows, 1 if per_row else dim)
            chunks = []
            for shard in self._saved_shards():
                offsets, _ = self._box(shard, shape)
                chunks.append(Chunk(offsets, _as_columns(memory[id(shard)][i])))
            state[key] = ChunkedTensor(shape, torch.float32, chunks)
        if state:
            # As torch's optimizers keep it, so that the table may be updated by one of them after
            # loading.
            state["step"] = torch.tensor(float(self.tables.num_fused_steps(self.table.full_name)))
        return state

    def load_fused(self, parameter: nn.Parameter, values: Mapping[str, Any]) -> None:
        """Load one shard's saved state into FBGEMM's."""
        memory = self.tables.shards.fused_state()
        keys = self.update.state_keys
        shard = self._shard(parameter)
        for i, (key, _) in enumerate(keys):
            lazy = as_lazy(values.get(key))
            if lazy is None:
                name = self.table.full_name
                raise CheckpointError(
                    f"table '{name}': the saved optimizer state has no '{key}', only "
                    f"{sorted(values)}."
                )
            self._check_fits(self.table.key, key, lazy.shape)
            if shard.values.numel():
                tensor = memory[id(shard)][i]
                # torch's optimizers save one number per row without a second dimension, FBGEMM's
                # state has it: both load.
                target = _as_columns(tensor)
                if len(lazy.shape) == 1:
                    target = tensor.detach().view(-1)
                offsets, _ = self._box(shard, lazy.shape)
                lazy.read_into([Chunk(offsets, target)])
        if keys and "step" in values:
            self.tables.set_fused_steps(self.table.full_name, round(float(values["step"])))

    @without_guards
    def read_local(
        self,
        name: str,
        parameter: nn.Parameter,
        values: Mapping[str, Any],
        starts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the saved state of one shard, for torch.

        name: of the table's weight. starts: with what the optimizer begins it, a tensor or a
        number.
        """
        shard = self._shard(parameter)
        local: dict[str, Any] = {}
        for key, value in values.items():
            lazy = as_lazy(value)
            if lazy is None or not lazy.shape:
                # A copy: each shard counts its own steps.
                local[key] = value if lazy is None else lazy.read().clone()
                continue
            self._check_fits(name, key, lazy.shape)
            offsets, shape = self._box(shard, lazy.shape)
            start = starts[key]
            # Rows that the saved table had not keep the state with which the optimizer begins.
            if isinstance(start, Tensor) and tuple(start.shape) == shape:
                tensor = start.clone()
            else:
                tensor = torch.full(
                    shape,
                    0.0 if isinstance(start, Tensor) else start,
                    dtype=lazy.dtype,
                    device=shard.weight.device,
                )
            if tensor.numel():
                lazy.read_into([Chunk(offsets, tensor)])
            local[key] = tensor
        return local

    def _shard(self, parameter: nn.Parameter) -> LocalShard:
        (shard,) = (shard for shard in self.shards if shard.weight is parameter)
        return shard

    def _saved_shards(self) -> list[LocalShard]:
        """Return the shards that this rank saves: replicas of a table, in other groups of ranks,
        are equal, and the first group's are saved."""
        if not self.tables.shards.groups.is_first:
            return []
        return [shard for shard in self.shards if shard.values.numel()]

    def _size(self) -> tuple[int, int]:
        return self.table.config.num_embeddings, self.table.config.embedding_dim

    def _box(self, shard: LocalShard, shape: Sequence[int]) -> Box:
        return shard_box(shard, shape, self.table.config.embedding_dim)

    def _check_fits(self, name: str, key: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError: a saved tensor has other rows or columns than the table."""
        rows, dim = self._size()
        has_rows = shape[0] == rows or (self.grow and shape[0] < rows)
        if not has_rows or tuple(shape[1:]) not in ((), (1,), (dim,)):
            raise CheckpointError(
                f"'{name}' is {rows} x {dim}, but the checkpoint's optimizer state '{key}' of it "
                f"is {tuple(shape)}."
            )


def shard_box(shard: LocalShard, shape: Sequence[int], dim: int) -> Box:
    """Return where a shard lies in a tensor along its table: of elements, of one column, or of one
    number per row. dim: of the table."""
    rows, columns = shard.values.shape
    if len(shape) == 1:
        return (shard.row,), (rows,)
    if shape[1] == dim:
        return (shard.row, shard.column), (rows, columns)
    return (shard.row, 0), (rows, 1)


def class_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class with its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _as_columns(tensor: Tensor) -> Tensor:
    """Return a tensor with one number per row as a column; one with two dimensions as it is."""
    return tensor.detach() if tensor.dim() == 2 else tensor.detach().unsqueeze(1)
