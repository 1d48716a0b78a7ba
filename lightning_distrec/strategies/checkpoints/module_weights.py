"""Loads a checkpoint's weights into the module: each rank reads its shards of tables, and of
DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_distrec.checkpoint.lazy_tensors import as_lazy, materialized_as
from lightning_distrec.errors import CheckpointError

if TYPE_CHECKING:  # it loads torchrec, which modules without tables do not need
    from lightning_distrec.sharding.sharded_tables import ShardedTables


def load_weights(
    module: LightningModule,
    shards: ShardedTables | None,
    state: Mapping[str, Any],
    *,
    strict: bool,
    grow: bool,
    added: Set[str] = frozenset(),
) -> None:
    """Load a state_dict of tensors or handles. grow: accept more rows. added: tables that it need
    not have. Raises CheckpointError: it does not fit."""
    keys: dict[str, str] = {}
    done: set[str] = set()
    if shards is not None:
        # It loads torchrec.
        from lightning_distrec.sharding.mapping.state import load_mappings, resized_mappings

        keys = shards.keys_in_tree()
        sizes = resized_mappings(module, state)
        configs = {table.full_name: table.config for table in shards.tables}
        for key, name in keys.items():
            if key in state:
                shape = configs[name].num_embeddings, configs[name].embedding_dim
                _refuse_resized_mapping(key, name, shape[0], state[key], sizes)
                _load_table(shards, key, name, shape, state[key], grow)
        mapped, errors = load_mappings(module, state)
        if errors:
            raise CheckpointError(f"the checkpoint does not fit the module: {errors[0]}")
        done = keys.keys() | mapped
    # With duplicates: the state has a shared parameter under each of its names.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    other_state = {}
    for key, value in state.items():
        if key not in done:
            parameter = parameters.get(key)
            start = 0.0 if parameter is None else parameter
            other_state[key] = materialized_as(value, parameter, start)
    try:
        # Never strict: tables and mappings are loaded already, and torch would report them as
        # missing.
        missing, unexpected = module.load_state_dict(other_state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the module: {error}") from error
    # A table with several shards on this rank has a parameter for each, with a suffix.
    more_shards = tuple(f"{key}_" for key in keys)
    missing = [key for key in missing if key not in done and not key.startswith(more_shards)]
    # A module that has two names is saved under both, and one of them is enough.
    loaded = {full_name for key, full_name in keys.items() if key in state}
    missing += [key for key, full_name in keys.items() if full_name not in loaded]
    missing = [key for key in missing if key not in added]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint does not fit the module: missing {missing}, unexpected {unexpected}. "
            "Build the module that was saved, map names by checkpoint={'rename': {old: new}}, or "
            "set strict_loading=False on the module."
        )
    if missing or unexpected:
        rank_zero_warn(
            "the checkpoint was loaded in part, as strict_loading=False allows: missing, and "
            f"unchanged, {missing}; in the checkpoint only {unexpected}."
        )


def _refuse_resized_mapping(
    key: str, name: str, num_rows: int, value: Any, sizes: set[tuple[int, int]]
) -> None:
    """Raise CheckpointError: the table's ids have rows by a mapping of another size."""
    shape = tuple(getattr(as_lazy(value), "shape", ())) or (0,)
    if (num_rows, shape[0]) in sizes:
        raise CheckpointError(
            f"table '{name}' has {num_rows} rows, and the checkpoint's '{key}' has {shape[0]}, to "
            f"which its ids are mapped: such a table cannot grow or shrink. Keep {shape[0]} rows; "
            "or let it start over under another name, with strict_loading=False on the module."
        )


def _load_table(
    shards: ShardedTables, key: str, name: str, shape: tuple[int, int], value: Any, grow: bool
) -> None:
    lazy = as_lazy(value)
    saved_shape = tuple(lazy.shape) if lazy is not None else type(value).__name__
    grows = (
        lazy is not None
        and len(lazy.shape) == 2
        and lazy.shape[1] == shape[1]
        and lazy.shape[0] < shape[0]
    )
    if saved_shape != shape and not (grows and grow):
        hint = (
            " To load its rows and initialize the others, set checkpoint={'grow_tables': True}."
            if grows
            else ""
        )
        raise CheckpointError(
            f"table '{name}' is {shape[0]} x {shape[1]}, but the checkpoint's '{key}' is "
            f"{saved_shape}.{hint}"
        )
    shards.load(name, lazy if not isinstance(value, Tensor) else value)
    if saved_shape != shape:
        rank_zero_info(
            f"table '{name}' has grown from {saved_shape[0]} rows to {shape[0]}; the added rows "
            "are initialized."
        )
