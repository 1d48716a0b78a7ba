"""The optimizer state of ZeRO-partitioned parameters, as every rank passes it to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_distrec.checkpoint.lazy_tensors import as_lazy, materialized_as
from lightning_distrec.checkpoint.plain_state import state_by_name
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError
from lightning_distrec.strategies.checkpoints.table_states import (
    SavedTables,
    as_columns,
    class_name,
    describe,
    layout_of,
    offsets_in_table,
    with_dims,
)

RankOf = Callable[[Tensor], int]
"""Returns the rank that holds a parameter's optimizer state; of several, the one that saves it."""


class StateRanks(NamedTuple):
    """Which ranks hold the optimizer state of a parameter."""

    rank_of: RankOf
    is_here: Callable[[Tensor], bool] | None = None
    """Whether this rank does; None: only the one of `rank_of`."""

    def hold(self, parameter: Tensor, rank: int) -> bool:
        """Whether a rank, this one, holds a parameter's state."""
        return self.rank_of(parameter) == rank if self.is_here is None else self.is_here(parameter)


def partitioned_state(
    parameters: Mapping[str, Tensor], optimizer: Optimizer, rank_of: RankOf, consensus: Consensus
) -> dict[str, dict[str, Any]]:
    """Collective. Return state by name: the rank that holds it has the values, the others shapes and types."""
    local_states = {
        name: optimizer.state[parameter]
        for name, parameter in parameters.items()
        if rank_of(parameter) == consensus.rank and parameter in optimizer.state
    }
    gathered = consensus.all_gather({
        name: {k: _like(v) for k, v in state.items()} for name, state in local_states.items()
    })
    likes = {name: like for rank_likes in gathered for name, like in rank_likes.items()}
    return {
        name: {key: _entry(like, local_states.get(name, {}).get(key)) for key, like in likes[name].items()}
        for name in parameters
        if name in likes
    }


def _like(value: Any) -> Any:
    """Return a tensor's shape and type; a small value as it is."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()
    return [value]


def _entry(like: Any, value: Tensor | None) -> Any:
    if isinstance(like, list):
        return like[0]
    if isinstance(like, Tensor):
        return like
    shape, dtype = like
    return ChunkedTensor(shape, dtype, [] if value is None else [Chunk((0,) * len(shape), value.detach())])


if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.optimizers.translation import TableUpdate
    from lightning_distrec.sharding.row_gradients import LocalShard
    from lightning_distrec.sharding.tables import Table

KEPT_IN_GROUPS = ("params", "param_names")
OF_TABLES = "of_tables"
"""Marks the states of table_optimizer, which follow those of configure_optimizers in Lightning's list."""


class SavedTable(NamedTuple):
    """A table, this rank's shards of it, and the tables of its run."""

    table: Table
    shards: list[LocalShard]
    tables: SavedTables

    @property
    def update(self) -> TableUpdate:
        """What updates the table."""
        return self.tables.updates[self.table.full_name]


class OptimizerStates:
    """The states of the optimizers of one fit.

    tables: its sharded tables, or None. state_ranks: which ranks hold a parameter's state; None: all ranks do.
    """

    def __init__(
        self,
        module: LightningModule,
        tables: SavedTables | None,
        consensus: Consensus,
        state_ranks: StateRanks | None = None,
    ) -> None:
        self._state_ranks = state_ranks
        self._consensus = consensus
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._tables: dict[str, SavedTable] = {}
        """Name of a table's weight -> the table."""
        if tables is not None:
            self._tables = {
                t.key: SavedTable(t, tables.shards.shards[t.full_name], tables) for t in tables.shards.tables
            }
            self._names |= {id(shard.weight): key for key, saved in self._tables.items() for shard in saved.shards}

    def of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's class, its param groups with names for parameters, and state by name."""
        names = self._named_groups(optimizer)
        groups = [
            {**{k: v for k, v in group.items() if k not in KEPT_IN_GROUPS}, "params": list(parameters)}
            for group, parameters in zip(optimizer.param_groups, names, strict=True)
        ]
        plain = {name: parameters[0] for name, parameters in _items(names) if name not in self._tables}
        if self._state_ranks is not None:
            state = partitioned_state(plain, optimizer, self._state_ranks.rank_of, self._consensus)
        else:
            state = {
                name: {key: _settled(value) for key, value in optimizer.state[p].items()}
                for name, p in plain.items()
                if p in optimizer.state
            }
        return {
            "optimizer": class_name(optimizer),
            "state": state | self._of_tables(names, optimizer),
            "param_groups": groups,
        }

    def _of_tables(self, names: list[dict[str, list[nn.Parameter]]], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        tables = [name for name, _ in _items(names) if name in self._tables]
        if not tables:
            return {}
        state = {name: _of_fused(self._tables[name]) for name in tables if self._tables[name].update.in_backward}
        unfused = [name for name in tables if not self._tables[name].update.in_backward]
        # A rank without rows of a table does not know which tensors its state has.
        described = self._consensus.all_gather({n: describe(self._tables[n].shards, optimizer) for n in unfused})
        for name in unfused:
            description = next((tables[name] for tables in described if tables[name] is not None), None)
            if description:
                state[name] = {key: self._entry(name, key, like, optimizer) for key, like in description.items()}
        return state

    def _entry(self, name: str, key: str, like: tuple[str, Any], optimizer: Optimizer) -> Any:
        kind, value = like
        if kind == "value":
            return value
        table, shards, _ = self._tables[name]
        shape = (table.config.num_embeddings, table.config.embedding_dim)[: 2 if kind == "elements" else 1]
        shape += (1,) if kind == "columns of 1" else ()
        tensors = [(s, optimizer.state[s.weight][key]) for s in shards if s.weight.numel()]
        if shards[0].replicated:
            return tensors[0][1].detach()
        is_first = self._tables[name].tables.shards.groups.is_first
        chunks = [Chunk(offsets_in_table(s, len(shape), kind), tensor) for s, tensor in tensors if is_first]
        return ChunkedTensor(shape, value, chunks)

    def load(
        self,
        saved: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Optimizer],
        table_optimizers: Sequence[Optimizer],
        warn: Callable[[str], None],
        grow: bool,
    ) -> None:
        """Load the optimizers' saved state; each rank reads its own shards.

        table_optimizers: those of tables alone. warn: called with what cannot be loaded, and starts empty. grow: accept
        tables with more rows than were saved.
        Raises CheckpointError: the optimizers or their groups are not those that were saved.
        """
        saved_of_tables = [state for state in saved if OF_TABLES in state]
        saved = [state for state in saved if OF_TABLES not in state]
        if len(saved_of_tables) != len(table_optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(saved_of_tables)} optimizers by table_optimizer, and this run "
                f"has {len(table_optimizers)}. Set table_optimizer, and optimizer in tables, as they were, or start a "
                "new run from its weights: checkpoint={'start_from': path}."
            )
        if len(saved) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(saved)} optimizers, and configure_optimizers returned "
                f"{len(optimizers)}. Return as many, or start a new run from its weights: "
                "checkpoint={'start_from': path}."
            )
        for number, (state, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
            self._load(f"optimizer {number}", state, optimizer, warn, grow)
        for state, optimizer in zip(saved_of_tables, table_optimizers, strict=True):
            self._load("table_optimizer", state, optimizer, warn, grow)

    def _load(
        self, label: str, saved: Mapping[str, Any], optimizer: Optimizer, warn: Callable[[str], None], grow: bool
    ) -> None:
        kind = class_name(optimizer)
        if saved.get("optimizer", kind) != kind:
            warn(
                f"{label} is a {kind}, and the checkpoint's was a {saved['optimizer']}: its state "
                "cannot be loaded and starts empty; learning rates are those of the new one."
            )
            return
        names = self._named_groups(optimizer)
        groups = saved["param_groups"]
        if len(groups) != len(names):
            raise CheckpointError(
                f"{label} has {len(names)} param groups, and the checkpoint's had {len(groups)}. Return the "
                "groups that were saved, or start a new run from its weights: checkpoint={'start_from': path}."
            )
        states, saved_names = state_by_name(saved, names, label)
        states_by_index: dict[int, Any] = {}
        numbered = []
        index = 0
        for group, current_group, named_parameters in zip(groups, optimizer.param_groups, names, strict=True):
            first = index
            for name, parameters in named_parameters.items():
                for parameter in parameters:
                    state = self._state_of(name, parameter, states.get(name), optimizer, grow, name in saved_names)
                    states_by_index |= {} if state is None else {index: state}
                    index += 1
            retained = {key: current_group[key] for key in KEPT_IN_GROUPS if key in current_group}
            numbered.append({**group, **retained, "params": list(range(first, index))})
        optimizer.load_state_dict({"state": states_by_index, "param_groups": numbered})
        fresh = [name for named_parameters in names for name in named_parameters if name not in saved_names]
        if fresh:
            ending = f" and {len(fresh) - 1} more" if fresh[1:] else ""
            warn(f"{label}: the checkpoint has no state of '{fresh[0]}'{ending}; it starts empty.")

    def _state_of(
        self,
        name: str,
        parameter: nn.Parameter,
        values: Mapping[str, Any] | None,
        optimizer: Optimizer,
        grow: bool,
        is_known: bool,
    ) -> dict[str, Any] | None:
        """Return the state that torch keeps for a parameter; None for none."""
        if values is None:  # it had no state when it was saved, or was not there
            return None if is_known or parameter not in optimizer.state else dict(optimizer.state[parameter])
        if name in self._tables:
            return self._local(name, parameter, values, optimizer, grow)
        if self._state_ranks is not None and not self._state_ranks.hold(parameter, self._consensus.rank):
            return None
        return {key: materialized_as(value, parameter) for key, value in values.items()}

    def _local(
        self, name: str, parameter: nn.Parameter, values: Mapping[str, Any], optimizer: Optimizer, grow: bool
    ) -> dict[str, Any] | None:
        """Return the state of a shard; None if FBGEMM keeps it, into which it is loaded then."""
        saved = self._tables[name]
        table = saved.table
        shard = next(shard for shard in saved.shards if shard.weight is parameter)
        if saved.update.in_backward:
            _load_fused(saved, shard, values, grow)
            return None
        old_state = optimizer.state.get(parameter, {})
        local: dict[str, Any] = {}
        for key, value in values.items():
            lazy = as_lazy(value)
            if lazy is None or not lazy.shape:
                local[key] = lazy.read().clone() if lazy is not None else value  # each shard counts its own steps
                continue
            kind = layout_of(name, key, lazy.shape, table, grow)
            rows, columns = shard.weight.shape
            shape = {"elements": (rows, columns), "columns of 1": (rows, 1), "rows": (rows,)}[kind]
            start = old_state.get(key)
            is_same_shape = isinstance(start, Tensor) and tuple(start.shape) == shape
            tensor = (
                start.clone() if is_same_shape else torch.zeros(shape, dtype=lazy.dtype, device=shard.weight.device)
            )
            if tensor.numel():
                lazy.read_into([Chunk(offsets_in_table(shard, len(shape), kind), tensor)])
            local[key] = tensor
        return local

    def _named_groups(self, optimizer: Optimizer) -> list[dict[str, list[nn.Parameter]]]:
        """Return, for each param group, the names of its parameters in order; a table's shards have one name."""
        groups: list[dict[str, list[nn.Parameter]]] = []
        for j, group in enumerate(optimizer.param_groups):
            named: dict[str, list[nn.Parameter]] = {}
            for i, parameter in enumerate(group["params"]):
                named.setdefault(self._names.get(id(parameter), f"group {j} parameter {i}"), []).append(parameter)
            groups.append(named)
        return groups


def _of_fused(saved: SavedTable) -> dict[str, Any]:
    """Return the state that FBGEMM keeps of a table."""
    table, shards, tables = saved
    state: dict[str, Any] = {}
    memory = tables.shards.fused_state()
    held = [s for s in shards if s.weight.numel() and tables.shards.groups.is_first]
    for i, (key, per_row) in enumerate(saved.update.state_keys):
        chunks = [Chunk((s.row, 0 if per_row else s.column), as_columns(memory[id(s)][i])) for s in held]
        columns = 1 if per_row else table.config.embedding_dim
        state[key] = ChunkedTensor((table.config.num_embeddings, columns), torch.float32, chunks)
    if state:
        state["step"] = torch.tensor(float(tables.num_fused_steps(table.full_name)))
    return state


def _load_fused(saved: SavedTable, shard: LocalShard, values: Mapping[str, Any], grow: bool) -> None:
    """Load one shard's state into FBGEMM's."""
    table, _, tables = saved
    memory = tables.shards.fused_state()
    keys = saved.update.state_keys
    for i, (key, _) in enumerate(keys):
        lazy = as_lazy(values.get(key))
        if lazy is None:
            raise CheckpointError(
                f"table '{table.full_name}': the checkpoint's optimizer state has no '{key}', only {sorted(values)}. "
                "It is another optimizer's."
            )
        kind = layout_of(table.key, key, lazy.shape, table, grow)
        if shard.weight.numel():
            dims = len(lazy.shape)
            lazy.read_into([Chunk(offsets_in_table(shard, dims, kind), with_dims(memory[id(shard)][i], dims))])
    if keys and "step" in values:
        tables.set_fused_steps(table.full_name, round(float(values["step"])))


def _settled(value: Any) -> Any:
    """Collective for a partial DTensor. Return it reduced; a scalar as a plain tensor."""
    if not isinstance(value, DTensor):
        return value
    summed = [Replicate() if placement.is_partial() else placement for placement in value.placements]
    value = value.redistribute(placements=summed)
    return value if value.dim() else value.to_local()


def _items(groups: list[dict[str, list[nn.Parameter]]]) -> Iterator[tuple[str, list[nn.Parameter]]]:
    for group in groups:
        yield from group.items()
