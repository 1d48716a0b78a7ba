"""The optimizers' state under the user's own names, whoever keeps it: torch, this rank's shards, or FBGEMM.

As it is saved, an optimizer's state has the names of the unsharded module's parameters, and tables' state the shape of
full tables. Neither the kernel, nor the sharding type, nor the number of ranks shows, so that any of them may differ
when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_distrec.checkpoint.chunking import split_replicated
from lightning_distrec.checkpoint.lazy_tensors import as_lazy, materialized_as
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError
from lightning_distrec.strategies.checkpoints.saved_tables import SavedTables
from lightning_distrec.strategies.checkpoints.zero_state import OwnerOf, owned_state

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.sharding.row_gradients import LocalShard
    from lightning_distrec.sharding.tables import Table

KEPT_IN_GROUPS = ("params", "param_names")


class OptimizerStates:
    """The states of the optimizers of one fit.

    tables: its sharded tables, or None. owner_of: the rank that keeps a parameter's state; None: all ranks do.
    """

    def __init__(
        self,
        module: LightningModule,
        tables: SavedTables | None,
        consensus: Consensus,
        owner_of: OwnerOf | None = None,
    ) -> None:
        self._tables = tables
        self._owner_of = owner_of
        self._consensus = consensus
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shards: dict[str, tuple[Table, list[LocalShard]]] = {}
        """Name of a table's weight -> the table and this rank's parts of it."""
        for table in tables.shards.tables if tables is not None else []:
            shards = tables.shards.shards[table.full_name] if tables is not None else []
            self._shards[table.key] = (table, shards)
            self._names |= {id(shard.weight): table.key for shard in shards}

    def of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's class, its param groups with names for parameters, and state by name."""
        names = self._named_groups(optimizer)
        groups = [
            {**{k: v for k, v in group.items() if k not in KEPT_IN_GROUPS}, "params": list(parameters)}
            for group, parameters in zip(optimizer.param_groups, names, strict=True)
        ]
        plain = {name: parameters[0] for name, parameters in _items(names) if name not in self._shards}
        if self._owner_of is not None:
            state = owned_state(plain, optimizer, self._owner_of, self._consensus)
        else:
            state = {
                name: {key: _settled(value) for key, value in optimizer.state[p].items()}
                for name, p in plain.items()
                if p in optimizer.state
            }
        return {
            "optimizer": _class_name(optimizer),
            "state": state | self._of_tables(names, optimizer),
            "param_groups": groups,
        }

    def _of_tables(self, names: list[dict[str, list[nn.Parameter]]], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        mine = [name for name, _ in _items(names) if name in self._shards]
        if not mine:
            return {}
        assert self._tables is not None
        state: dict[str, dict[str, Any]] = {}
        kept = [name for name in mine if not self._tables.updates[self._shards[name][0].full_name].in_backward]
        for name in mine:
            table, shards = self._shards[name]
            update = self._tables.updates[table.full_name]
            if update.in_backward:
                state[name] = self._of_fused(table, shards, name)
        # A rank without rows of a table cannot see what its state is like.
        described = self._consensus.all_gather({name: _describe(self._shards[name][1], optimizer) for name in kept})
        for name in kept:
            found = next((of_rank[name] for of_rank in described if of_rank[name] is not None), None)
            if found:
                state[name] = {key: self._entry(name, key, like, optimizer) for key, like in found.items()}
        return state

    def _of_fused(self, table: Table, shards: list[LocalShard], name: str) -> dict[str, Any]:
        assert self._tables is not None
        state: dict[str, Any] = {}
        memory = self._tables.shards.fused_state()
        for i, (key, per_row) in enumerate(self._tables.updates[table.full_name].state_keys):
            parts = [
                Chunk((s.row, 0 if per_row else s.column), _columns(memory[id(s)][i]))
                for s in shards
                if s.weight.numel()
            ]
            columns = 1 if per_row else table.config.embedding_dim
            state[key] = ChunkedTensor((table.config.num_embeddings, columns), torch.float32, parts)
        if state:
            state["step"] = torch.tensor(float(self._tables.num_fused_steps(table.full_name)))
        return state

    def _entry(self, name: str, key: str, like: tuple[str, Any], optimizer: Optimizer) -> Any:
        kind, value = like
        if kind == "value":
            return value
        table, shards = self._shards[name]
        shape = (table.config.num_embeddings, table.config.embedding_dim)[: 2 if kind == "elements" else 1]
        shape += (1,) if kind == "columns of 1" else ()
        tensors = [(s, optimizer.state[s.weight][key]) for s in shards if s.weight.numel()]
        if shards[0].replicated:
            return split_replicated(tensors[0][1], self._consensus.rank, self._consensus.num_ranks, turn=0)
        parts = [Chunk(_offsets(s, len(shape), kind), tensor) for s, tensor in tensors]
        return ChunkedTensor(shape, value, parts)

    def load(
        self,
        saved: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Optimizer],
        say: Callable[[str], None],
        grow: bool,
    ) -> None:
        """Give the optimizers their saved state; this rank reads its parts only, without the others.

        say: told what cannot carry over, and starts anew. grow: whether tables may have more rows than were saved.
        Raises CheckpointError: the optimizers or their groups are not those that were saved.
        """
        if len(saved) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(saved)} optimizers, and configure_optimizers returned "
                f"{len(optimizers)}. Return as many, or start a new run from its weights: "
                "checkpoint={'start_from': path}."
            )
        for number, (state, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
            self._load(number, state, optimizer, say, grow)

    def _load(
        self, number: int, saved: Mapping[str, Any], optimizer: Optimizer, say: Callable[[str], None], grow: bool
    ) -> None:
        kind = _class_name(optimizer)
        if saved.get("optimizer", kind) != kind:
            say(
                f"optimizer {number} is a {kind}, and the checkpoint's was a {saved['optimizer']}: its state cannot "
                "carry over and begins anew; learning rates are those of the new one."
            )
            return
        names = self._named_groups(optimizer)
        groups = saved["param_groups"]
        if len(groups) != len(names):
            raise CheckpointError(
                f"optimizer {number} has {len(names)} param groups, and the checkpoint's had {len(groups)}. Return the "
                "groups that were saved, or start a new run from its weights: checkpoint={'start_from': path}."
            )
        states, known = _by_name(saved, names, number)
        own: dict[int, Any] = {}
        numbered = []
        index = 0
        for group, now, of_group in zip(groups, optimizer.param_groups, names, strict=True):
            first = index
            for name, parameters in of_group.items():
                for parameter in parameters:
                    found = self._state_of(name, parameter, states.get(name), optimizer, grow, name in known)
                    own |= {} if found is None else {index: found}
                    index += 1
            kept = {key: now[key] for key in KEPT_IN_GROUPS if key in now}
            numbered.append({**group, **kept, "params": list(range(first, index))})
        optimizer.load_state_dict({"state": own, "param_groups": numbered})
        fresh = [name for of_group in names for name in of_group if name not in known]
        if fresh:
            more = f" and {len(fresh) - 1} more" if fresh[1:] else ""
            say(f"optimizer {number}: the checkpoint has no state of '{fresh[0]}'{more}; it begins anew.")

    def _state_of(
        self,
        name: str,
        parameter: nn.Parameter,
        values: Mapping[str, Any] | None,
        optimizer: Optimizer,
        grow: bool,
        is_known: bool,
    ) -> dict[str, Any] | None:
        """Return the state that torch is to keep of a parameter; None for none."""
        if values is None:  # it had not begun when it was saved, or it was not there
            return None if is_known or parameter not in optimizer.state else dict(optimizer.state[parameter])
        if name in self._shards:
            return self._local(name, parameter, values, optimizer, grow)
        if self._owner_of is not None and self._owner_of(parameter) != self._consensus.rank:
            return None
        return {key: materialized_as(value, parameter) for key, value in values.items()}

    def _local(
        self, name: str, parameter: nn.Parameter, values: Mapping[str, Any], optimizer: Optimizer, grow: bool
    ) -> dict[str, Any] | None:
        """Return this rank's part of a table's state; None where FBGEMM keeps it, which then has it."""
        assert self._tables is not None
        table, shards = self._shards[name]
        shard = next(shard for shard in shards if shard.weight is parameter)
        if self._tables.updates[table.full_name].in_backward:
            self._fill_fused(table, shard, values, grow)
            return None
        before = optimizer.state.get(parameter, {})
        local: dict[str, Any] = {}
        for key, value in values.items():
            lazy = as_lazy(value)
            if lazy is None or not lazy.shape:
                local[key] = lazy.read().clone() if lazy is not None else value  # each shard counts its own steps
                continue
            kind = _kind_of(name, key, lazy.shape, table, grow)
            rows, columns = shard.weight.shape
            shape = {"elements": (rows, columns), "columns of 1": (rows, 1), "rows": (rows,)}[kind]
            start = before.get(key)
            same = isinstance(start, Tensor) and tuple(start.shape) == shape
            tensor = start.clone() if same else torch.zeros(shape, dtype=lazy.dtype, device=shard.weight.device)
            if tensor.numel():
                lazy.read_into([Chunk(_offsets(shard, len(shape), kind), tensor)])
            local[key] = tensor
        return local

    def _fill_fused(self, table: Table, shard: LocalShard, values: Mapping[str, Any], grow: bool) -> None:
        assert self._tables is not None
        memory = self._tables.shards.fused_state()
        keys = self._tables.updates[table.full_name].state_keys
        for i, (key, _) in enumerate(keys):
            lazy = as_lazy(values.get(key))
            if lazy is None:
                raise CheckpointError(
                    f"table '{table.full_name}': the checkpoint's optimizer state has no '{key}', only "
                    f"{sorted(values)}. It is another optimizer's."
                )
            kind = _kind_of(table.key, key, lazy.shape, table, grow)
            if shard.weight.numel():
                tensor = memory[id(shard)][i]
                lazy.read_into([Chunk(_offsets(shard, len(lazy.shape), kind), _as(tensor, len(lazy.shape)))])
        if keys and "step" in values:
            self._tables.set_fused_steps(table.full_name, round(float(values["step"])))

    def _named_groups(self, optimizer: Optimizer) -> list[dict[str, list[nn.Parameter]]]:
        """Return, for each param group, the names of its parameters in order; a table's shards have one name."""
        groups: list[dict[str, list[nn.Parameter]]] = []
        for j, group in enumerate(optimizer.param_groups):
            named: dict[str, list[nn.Parameter]] = {}
            for i, parameter in enumerate(group["params"]):
                named.setdefault(self._names.get(id(parameter), f"group {j} parameter {i}"), []).append(parameter)
            groups.append(named)
        return groups


def _settled(value: Any) -> Any:
    """Collective for a DTensor of which ranks have summands. Return it with its sums; a single number as a tensor."""
    if not isinstance(value, DTensor):
        return value
    summed = [Replicate() if placement.is_partial() else placement for placement in value.placements]
    value = value.redistribute(placements=summed)
    return value if value.dim() else value.to_local()


def _items(groups: list[dict[str, list[nn.Parameter]]]) -> Iterator[tuple[str, list[nn.Parameter]]]:
    for group in groups:
        yield from group.items()


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _by_name(
    saved: Mapping[str, Any], names: list[dict[str, Any]], number: int
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return the saved state by parameters' names, and the names of all that the optimizer had.

    A state of torch's own has numbers for names, which count the parameters in the order of the groups.
    """
    if "optimizer" in saved:
        return dict(saved["state"]), {name for group in saved["param_groups"] for name in group["params"]}
    states: dict[str, Mapping[str, Any]] = {}
    for j, (group, named) in enumerate(zip(saved["param_groups"], names, strict=True)):
        if len(group["params"]) != len(named):
            raise CheckpointError(
                f"optimizer {number}: param group {j} has {len(named)} parameters, and the checkpoint's had "
                f"{len(group['params'])}. Build the module and the groups that were saved, or start a new run from its "
                "weights: checkpoint={'start_from': path}."
            )
        for index, name in zip(group["params"], named, strict=True):
            if index in saved["state"]:
                states[name] = saved["state"][index]
    return states, {name for named in names for name in named}


def _describe(shards: list[LocalShard], optimizer: Optimizer) -> dict[str, tuple[str, Any]] | None:
    """Return key -> how its value lies along the table, and its type or value; None where this rank cannot tell."""
    shard = next((shard for shard in shards if shard.weight.numel()), None)
    if shard is None:
        return None
    described = {}
    rows, columns = shard.weight.shape
    kinds = {(rows, columns): "elements", (rows, 1): "columns of 1", (rows,): "rows"}
    for key, value in optimizer.state.get(shard.weight, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            described[key] = ("value", value.cpu() if isinstance(value, Tensor) else value)
        elif tuple(value.shape) in kinds:
            described[key] = (kinds[tuple(value.shape)], value.dtype)
        else:
            raise CheckpointError(
                f"table '{shard.table}': {_class_name(optimizer)} keeps '{key}' of shape {tuple(value.shape)} for a "
                f"shard of {rows} x {columns}, which belongs to no rows of it and cannot be saved. Save with "
                "save_weights_only=True, or give the table another optimizer."
            )
    return described


def _offsets(shard: LocalShard, dims: int, kind: str) -> tuple[int, ...]:
    return (shard.row,) if dims == 1 else (shard.row, shard.column if kind == "elements" else 0)


def _columns(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dim() == 2 else tensor.detach().unsqueeze(1)


def _as(tensor: Tensor, dims: int) -> Tensor:
    """Return FBGEMM's state of a shard with as many dimensions as the saved one has."""
    return tensor.detach().view(-1) if dims == 1 else _columns(tensor)


def _kind_of(name: str, key: str, shape: Sequence[int], table: Table, grow: bool) -> str:
    """Return how a saved tensor lies along the table. Raises CheckpointError: it has other rows or columns."""
    rows, dim = table.config.num_embeddings, table.config.embedding_dim
    fits = shape[0] == rows or (grow and shape[0] < rows)
    if fits and len(shape) == 1:
        return "rows"
    if fits and len(shape) == 2 and shape[1] in (dim, 1):
        return "elements" if shape[1] == dim else "columns of 1"
    raise CheckpointError(
        f"'{name}' is {rows} x {dim}, but the checkpoint's optimizer state '{key}' of it is {tuple(shape)}."
    )
