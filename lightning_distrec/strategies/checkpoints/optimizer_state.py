"""The optimizers' state under the user's own names, whoever keeps it: torch, this rank's shards, or
FBGEMM.

It has the unsharded module's names and shapes: kernel, sharding type and ranks may differ when it
is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_distrec.checkpoint.lazy_tensors import materialized_as
from lightning_distrec.checkpoint.plain_state import numbered_names
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError
from lightning_distrec.optimizers.param_groups import initial_state
from lightning_distrec.strategies.checkpoints.table_states import (
    Description,
    SavedTable,
    SavedTables,
    class_name,
)

UNSAVED_KEYS = ("params", "param_names")
"""Keys of param groups that are the optimizer's, not the checkpoint's."""
START = "or start a new run from its weights: checkpoint={'start_from': path}."
OF_TABLES = "of_tables"
"""Marks the states of tables' own optimizers, which follow those of configure_optimizers in
Lightning's list."""

NamedGroup = dict[str, list[nn.Parameter]]
"""The parameters of a param group by name; a table's shards have one."""
RankOf = Callable[[Tensor], int]
"""Returns the rank that holds a parameter's optimizer state; of several, the one that saves it."""


class StateRanks(NamedTuple):
    """Which ranks hold the optimizer state of a parameter, where not all do: those of a pipeline's
    stages."""

    rank_of: RankOf
    is_local: Callable[[Tensor], bool]
    """Whether this rank does."""


class OptimizerStates:
    """The states of one fit's optimizers.

    state_ranks: which ranks hold a parameter's state; None: all ranks do. grow: accept tables with
    more rows.
    """

    def __init__(
        self,
        module: LightningModule,
        tables: SavedTables | None,
        consensus: Consensus,
        state_ranks: StateRanks | None,
        grow: bool,
    ) -> None:
        self._state_ranks = state_ranks
        self._consensus = consensus
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.parameters = {
            name: [parameter] for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        """By the names that checkpoints have; of a table, this rank's shards."""
        self._tables: dict[str, SavedTable] = {}
        """Name of a table's weight -> the table."""
        if tables is not None:
            shards = tables.shards.shards
            self._tables = {
                t.key: SavedTable(t, shards[t.full_name], tables, grow)
                for t in tables.shards.tables
            }
            # Shards replaced the parameters of the unsharded module, and are saved under its name
            # for the table.
            for key, saved in self._tables.items():
                self.parameters[key] = [shard.weight for shard in saved.shards]
                for weight in self.parameters[key]:
                    self._names[id(weight)] = key

    def collect(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's class, its param groups with names for parameters, and
        state by name."""
        classes = []
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in _members(optimizer):
            classes.append(class_name(member))
            named_groups = self._named_groups(member)
            state |= self._collect_state(member, named_groups)
            for group, parameters in zip(member.param_groups, named_groups, strict=True):
                saved = {key: value for key, value in group.items() if key not in UNSAVED_KEYS}
                groups.append({**saved, "params": list(parameters)})
        return {"optimizer": " + ".join(classes), "state": state, "param_groups": groups}

    def _collect_state(
        self, optimizer: Optimizer, named_groups: list[NamedGroup]
    ) -> dict[str, Any]:
        plain: dict[str, Tensor] = {}
        tables: dict[str, SavedTable] = {}
        for group in named_groups:
            for name, parameters in group.items():
                if name in self._tables:
                    tables[name] = self._tables[name]
                else:
                    plain[name] = parameters[0]
        state: dict[str, Any] = {}
        if self._state_ranks is not None:
            rank_of = self._state_ranks.rank_of
            state = _collect_partitioned(
                plain,
                optimizer,
                rank_of,
                self._consensus,
            )
        else:
            for name, parameter in plain.items():
                if parameter in optimizer.state:
                    values = optimizer.state[parameter]
                    state[name] = {key: _reduced(value) for key, value in values.items()}
        return state | self._collect_tables(tables, optimizer)

    def _collect_tables(
        self, tables: dict[str, SavedTable], optimizer: Optimizer
    ) -> dict[str, dict[str, Any]]:
        state = {}
        unfused = {}
        for name, table in tables.items():
            if table.update.in_backward:
                state[name] = table.collect_fused()
            else:
                unfused[name] = table
        if not unfused:
            return state
        local = {name: table.describe_state(optimizer) for name, table in unfused.items()}
        # A rank without rows of a table does not know which tensors its state has.
        described = _first_of(self._consensus.all_gather(local))
        for name, table in unfused.items():
            if name in described:
                state[name] = {}
                for key, description in described[name].items():
                    state[name][key] = table.collect_value(key, description, optimizer)
        return state

    def load(
        self,
        saved: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Optimizer],
        own_optimizers: Sequence[Optimizer],
    ) -> None:
        """Load each optimizer's saved state. Raises CheckpointError: other ones, or other groups,
        were saved."""
        saved_of_tables = [state for state in saved if OF_TABLES in state]
        saved = [state for state in saved if OF_TABLES not in state]
        if (
            own_optimizers
            and not saved_of_tables
            and not any("optimizer" in state for state in saved)
        ):
            # Lightning's own checkpoints have none of in-backward optimizers, and start theirs
            # again as well.
            rank_zero_warn(
                "the checkpoint has no state of the optimizers of tables alone: it starts empty."
            )
            own_optimizers = []
        if len(saved_of_tables) != len(own_optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(saved_of_tables)} optimizers of tables "
                f"alone, and this run has {len(own_optimizers)} (table_optimizer, optimizer in "
                f"tables, apply_optimizer_in_backward). Set them as they were, {START}"
            )
        if len(saved) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(saved)} optimizers, and "
                f"configure_optimizers returned {len(optimizers)}. Return as many, {START}"
            )
        for number, (state, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
            self._load(f"optimizer {number}", state, optimizer)
        for state, optimizer in zip(saved_of_tables, own_optimizers, strict=True):
            self._load("a table's optimizer", state, optimizer)

    def _load(self, label: str, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
        members = _members(optimizer)
        kind = " + ".join(map(class_name, members))
        if "param_groups" not in saved:
            raise CheckpointError(
                f"{label}: the checkpoint has its state in the form of torchrec's KeyedOptimizer, "
                "without param groups, as other strategies save it. Start a new run from its "
                "weights by checkpoint.start_from."
            )
        if saved.get("optimizer", kind) != kind:
            rank_zero_warn(
                f"{label} is a {kind}, and the checkpoint's was a {saved['optimizer']}: its state "
                "starts empty."
            )
            return
        groups = list(saved["param_groups"])
        num_groups = sum(len(member.param_groups) for member in members)
        if len(groups) != num_groups:
            raise CheckpointError(
                f"{label} has {num_groups} param groups, and the checkpoint's had {len(groups)}. "
                f"Return as many, {START}"
            )
        for member in members:
            first = groups[: len(member.param_groups)]
            groups = groups[len(member.param_groups) :]
            self._load_member(label, {**saved, "param_groups": first}, member)

    def _load_member(self, label: str, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
        names = self._named_groups(optimizer)
        states, saved_names = _state_by_name(saved, names, label)
        states_by_index: dict[int, Any] = {}
        numbered = []
        index = 0
        fresh = []
        triples = zip(
            saved["param_groups"],
            optimizer.param_groups,
            names,
            strict=True,
        )
        for group, current_group, named_parameters in triples:
            first = index
            for name, parameters in named_parameters.items():
                is_saved = name in saved_names
                if not is_saved:
                    fresh.append(name)
                for parameter in parameters:
                    values = states.get(name)
                    state = self._local_state(
                        name,
                        parameter,
                        values,
                        optimizer.state.get(parameter),
                        current_group,
                        is_saved,
                    )
                    if state is not None:
                        states_by_index[index] = state
                    index += 1
            unsaved = {key: current_group[key] for key in UNSAVED_KEYS if key in current_group}
            numbered.append({**group, **unsaved, "params": list(range(first, index))})
        # torch's own loading moves values to the parameter's device and type, and keeps "step" as
        # it is.
        optimizer.load_state_dict({"state": states_by_index, "param_groups": numbered})
        if any(hasattr(parameter, "place") for parameter in optimizer.state):
            # Here, since runs without tables import no torchrec.
            from lightning_distrec.sharding.weights.shard_weight import guard_state

            guard_state(optimizer)
        if fresh:
            ending = f" and {len(fresh) - 1} more" if fresh[1:] else ""
            rank_zero_warn(
                f"{label}: the checkpoint has no state of '{fresh[0]}'{ending}; it starts empty."
            )

    def _local_state(
        self,
        name: str,
        parameter: nn.Parameter,
        values: Mapping[str, Any] | None,
        state: Mapping[str, Any] | None,
        group: Mapping[str, Any],
        is_saved: bool,
    ) -> dict[str, Any] | None:
        """Return the state that torch keeps for a parameter; None for none.

        state: what it has now. group: the param group that it is in.
        """
        if values is None:  # it had no state when it was saved, or was not there
            return None if is_saved or state is None else dict(state)
        starts = {key: initial_state(group, key) for key in values} | dict(state or {})
        table = self._tables.get(name)
        if table is not None:
            if table.update.in_backward:
                table.load_fused(parameter, values)
                return None
            return table.read_local(name, parameter, values, starts)
        if self._state_ranks is not None and not self._state_ranks.is_local(parameter):
            return None
        return {
            key: materialized_as(value, parameter, starts[key]) for key, value in values.items()
        }

    def _named_groups(self, optimizer: Optimizer) -> list[NamedGroup]:
        """Return, for each param group, the names of its parameters in order; a table's shards have
        one name."""
        groups: list[NamedGroup] = []
        for j, group in enumerate(optimizer.param_groups):
            named: NamedGroup = {}
            for i, parameter in enumerate(group["params"]):
                name = self._names.get(id(parameter), f"group {j} parameter {i}")
                named.setdefault(name, []).append(parameter)
            groups.append(named)
        return groups


def _first_of(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the first rank that has something under a name has there."""
    first: dict[str, Any] = {}
    for values in per_rank:
        for name, value in values.items():
            if value is not None:
                first.setdefault(name, value)
    return first


def _state_by_name(
    saved: Mapping[str, Any], names: list[NamedGroup], label: str
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return the saved state by parameters' names, which torch's own numbers in order, and all
    names that it is of."""
    if "optimizer" in saved:
        return dict(saved["state"]), set(numbered_names(saved))
    states: dict[str, Mapping[str, Any]] = {}
    for j, (group, named) in enumerate(zip(saved["param_groups"], names, strict=True)):
        if len(group["params"]) != len(named):
            raise CheckpointError(
                f"{label}: param group {j} has {len(named)} parameters, and the checkpoint's had "
                f"{len(group['params'])}. Build the module and the groups that were saved, {START}"
            )
        for index, name in zip(group["params"], named, strict=True):
            if index in saved["state"]:
                states[name] = saved["state"][index]
    return states, set().union(*names)


def _collect_partitioned(
    parameters: Mapping[str, Tensor], optimizer: Optimizer, rank_of: RankOf, consensus: Consensus
) -> dict[str, dict[str, Any]]:
    """Collective. Return state by name: the rank that holds it has the values, the others shapes
    and types."""
    local_states: dict[str, dict[str, Any]] = {}
    described: dict[str, dict[str, Description]] = {}
    for name, parameter in parameters.items():
        if rank_of(parameter) == consensus.rank and parameter in optimizer.state:
            values = optimizer.state[parameter]
            local_states[name] = values
            described[name] = {key: _describe(value) for key, value in values.items()}
    # All ranks make the same entries, one with data: writing needs equal names on all of them.
    described = _first_of(consensus.all_gather(described))
    collected: dict[str, dict[str, Any]] = {}
    for name in parameters:
        if name not in described:
            continue
        values = local_states.get(name, {})
        collected[name] = {}
        for key, (shape, dtype_or_value) in described[name].items():
            if shape is None:
                collected[name][key] = dtype_or_value
                continue
            chunks = []
            if key in values:
                chunks.append(Chunk((0,) * len(shape), values[key].detach()))
            collected[name][key] = ChunkedTensor(shape, dtype_or_value, chunks)
    return collected


def _describe(value: Any) -> Description:
    """Return a tensor's shape and type; None and a small value as it is."""
    if isinstance(value, Tensor):
        # Numbers, such as torch's "step", go along with the descriptions: too small for chunks of a
        # file.
        return (tuple(value.shape), value.dtype) if value.dim() else (None, value.detach().cpu())
    return None, value


def _reduced(value: Any) -> Any:
    """Collective for a partial DTensor. Return it reduced; a scalar as a plain tensor."""
    if not isinstance(value, DTensor):
        return value
    # Each rank has only a summand of a partial value; replicating it adds them up.
    placements = []
    for placement in value.placements:
        placements.append(Replicate() if placement.is_partial() else placement)
    value = value.redistribute(placements=placements)
    return value if value.dim() else value.to_local()


def _members(optimizer: Optimizer) -> list[Optimizer]:
    """Return torch's optimizers inside of TorchRec's wrappers, whose own state dicts have other
    forms."""
    # so it is none of those; modules without tables need no torchrec
    if "torchrec.optim.keyed" not in sys.modules:
        return [optimizer]
    from lightning_distrec.optimizers.torchrec_optimizers import members_of

    return members_of([optimizer])
