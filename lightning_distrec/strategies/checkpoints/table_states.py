"""The optimizer state of sharded tables as checkpoints hold it: along the full table, by element,
row or column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.errors import CheckpointError
from lightning_distrec.sharding.weights.shard_access import without_guards

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.optimizers.translation import TableUpdate
    from lightning_distrec.sharding.row_gradients import LocalShard
    from lightning_distrec.sharding.sharded_tables import ShardedTables
    from lightning_distrec.sharding.tables import Table


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
    def describe_state(self, optimizer: Optimizer) -> dict[str, tuple[str, Any]] | None:
        """Return key -> how its value lies along the table, and its type or value; None if this
        rank has no rows."""
        shard = next((shard for shard in self.shards if shard.values.numel()), None)
        if shard is None:
            return None
        described = {}
        rows, columns = shard.values.shape
        kinds = {(rows, columns): "elements", (rows, 1): "columns of 1", (rows,): "rows"}
        for key, value in optimizer.state.get(shard.weight, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                described[key] = ("value", value.cpu() if isinstance(value, Tensor) else value)
            elif tuple(value.shape) in kinds:
                described[key] = (kinds[tuple(value.shape)], value.dtype)
            else:
                raise CheckpointError(
                    f"table '{shard.table}': {class_name(optimizer)} keeps '{key}' of shape "
                    f"{tuple(value.shape)} for a "
                    f"shard of {rows} x {columns}, which cannot be saved by the row. Save with "
                    "save_weights_only=True, "
                    "or give the table another optimizer."
                )
        return described

    @without_guards
    def collect_value(self, key: str, description: tuple[str, Any], optimizer: Optimizer) -> Any:
        """Return a value of torch's state for the full table. description: see `describe_state`,
        the same on ranks."""
        kind, value = description
        if kind == "value":
            return value
        num_rows, dim = self.table.config.num_embeddings, self.table.config.embedding_dim
        shape = {"elements": (num_rows, dim), "columns of 1": (num_rows, 1), "rows": (num_rows,)}[
            kind
        ]
        tensors = [
            (s, optimizer.state[s.weight][key].detach()) for s in self.shards if s.values.numel()
        ]
        # Every rank has all of it: a plain tensor, whose rows are divided among ranks for writing.
        if self.shards[0].replicated:
            return tensors[0][1]
        is_first = self.tables.shards.groups.is_first
        chunks = [
            Chunk(_offsets(shard, len(shape), kind), tensor)
            for shard, tensor in tensors
            if is_first
        ]
        return ChunkedTensor(shape, value, chunks)

    def collect_fused(self) -> dict[str, Any]:
        """Return the state that FBGEMM keeps of the table."""
        state: dict[str, Any] = {}
        config, memory = self.table.config, self.tables.shards.fused_state()
        # Replicas of a table, in other groups of ranks, are equal: the first group's are saved.
        shards = [s for s in self.shards if s.values.numel() and self.tables.shards.groups.is_first]
        for i, (key, per_row) in enumerate(self.update.state_keys):
            chunks = [
                Chunk((s.row, 0 if per_row else s.column), _as_columns(memory[id(s)][i]))
                for s in shards
            ]
            columns = 1 if per_row else config.embedding_dim
            state[key] = ChunkedTensor((config.num_embeddings, columns), torch.float32, chunks)
        if state:
            # As torch's optimizers keep it, so that the table may be updated by one of them after
            # loading.
            state["step"] = torch.tensor(float(self.tables.num_fused_steps(self.table.full_name)))
        return state

    def load_fused(self, parameter: nn.Parameter, values: Mapping[str, Any]) -> None:
        """Load one shard's saved state into FBGEMM's."""
        memory, keys, shard = (
            self.tables.shards.fused_state(),
            self.update.state_keys,
            self._shard(parameter),
        )
        for i, (key, _) in enumerate(keys):
            lazy = as_lazy(values.get(key))
            if lazy is None:
                name = self.table.full_name
                raise CheckpointError(
                    f"table '{name}': the saved optimizer state has no '{key}', only "
                    f"{sorted(values)}."
                )
            kind = self._layout(self.table.key, key, lazy.shape)
            if shard.values.numel():
                tensor, num_dims = memory[id(shard)][i], len(lazy.shape)
                # torch's optimizers save one number per row without a second dimension, FBGEMM's
                # state has it: both load.
                target = tensor.detach().view(-1) if num_dims == 1 else _as_columns(tensor)
                lazy.read_into([Chunk(_offsets(shard, num_dims, kind), target)])
        if keys and "step" in values:
            self.tables.set_fused_steps(self.table.full_name, round(float(values["step"])))

    @without_guards
    def read_local(
        self, name: str, parameter: nn.Parameter, values: Mapping[str, Any], optimizer: Optimizer
    ) -> dict[str, Any]:
        """Return the saved state of one shard, for torch. name: of the table's weight."""
        shard = self._shard(parameter)
        old_state = optimizer.state.get(parameter, {})
        local: dict[str, Any] = {}
        for key, value in values.items():
            lazy = as_lazy(value)
            if lazy is None or not lazy.shape:
                # each shard counts its own steps
                local[key] = lazy.read().clone() if lazy is not None else value
                continue
            kind = self._layout(name, key, lazy.shape)
            rows, columns = shard.values.shape
            shape = {"elements": (rows, columns), "columns of 1": (rows, 1), "rows": (rows,)}[kind]
            start = old_state.get(key)
            # Rows that the saved table had not keep the state with which the optimizer begins.
            if isinstance(start, Tensor) and tuple(start.shape) == shape:
                tensor = start.clone()
            else:
                tensor = torch.zeros(shape, dtype=lazy.dtype, device=shard.weight.device)
            if tensor.numel():
                lazy.read_into([Chunk(_offsets(shard, len(shape), kind), tensor)])
            local[key] = tensor
        return local

    def _shard(self, parameter: nn.Parameter) -> LocalShard:
        return next(shard for shard in self.shards if shard.weight is parameter)

    def _layout(self, name: str, key: str, shape: Sequence[int]) -> str:
        """Return how a saved tensor lies along the table. Raises CheckpointError: it has other rows
        or columns."""
        rows, dim = self.table.config.num_embeddings, self.table.config.embedding_dim
        fits = shape[0] == rows or (self.grow and shape[0] < rows)
        if fits and len(shape) == 1:
            return "rows"
        if fits and len(shape) == 2 and shape[1] in (dim, 1):
            return "elements" if shape[1] == dim else "columns of 1"
        raise CheckpointError(
            f"'{name}' is {rows} x {dim}, but the checkpoint's optimizer state '{key}' of it is "
            f"{tuple(shape)}."
        )


def class_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class with its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _offsets(shard: LocalShard, num_dims: int, kind: str) -> tuple[int, ...]:
    """Return where a shard's state begins in that of the full table."""
    return (shard.row,) if num_dims == 1 else (shard.row, shard.column if kind == "elements" else 0)


def _as_columns(tensor: Tensor) -> Tensor:
    """Return a tensor with one number per row as a column; one with two dimensions as it is."""
    return tensor.detach() if tensor.dim() == 2 else tensor.detach().unsqueeze(1)
