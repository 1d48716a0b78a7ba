"""Tables of a fit that goes on with newer data: which of their rows are the checkpoint's.

The data module merges the mapping from values to rows, and says what becomes of each table's rows;
see ColumnData.grown.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_distrec.checkpoint.lazy_tensors import GrownTensor, as_lazy
from lightning_distrec.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # it loads torchrec, which modules without tables do not need
    from lightning_distrec.sharding.sharded_tables import ShardedTables

AVERAGES = (StochasticWeightAveraging, WeightAveraging)
"""Lightning's callbacks that have copies of all of a model."""
COLLECTIONS = {"embedding_bag_configs": "embedding_bags", "embedding_configs": "embeddings"}
"""Method of torchrec's collections that returns the configs of tables -> where these are."""


class _Lookup(NamedTuple):
    num_rows: int
    names: Set[str]
    """Of the features that are looked up; of nn.Embedding and nn.EmbeddingBag, its own."""


class GrownTables:
    """What data that grow change in a checkpoint, which it was made of, and in the module."""

    def __init__(
        self, checkpoint: dict[str, Any], module: LightningModule, shards: ShardedTables | None
    ) -> None:
        """Merge the columns in the checkpoint with the data's, and let its tensors have the rows
        that tables have now.

        Raises ConfigError: the features do not fit; CheckpointError: it is not clear which table
        changes.
        """
        self.rows: list[str] = []
        """Keys of the tables whose rows change."""
        self.added: set[str] = set()
        """Keys of the tables that the checkpoint has not."""
        if not grows(module):
            return
        data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
        name = type(data).__qualname__
        if name not in checkpoint:
            raise ConfigError(
                f"{name}(grow=True): the checkpoint has no features of a {name}, so that it is not "
                "known which values its rows are of. Set grow=False, and train a new model."
            )
        growth = data.grown(checkpoint[name])
        checkpoint[name] = {"columns": growth.plain, "is_grown": True}
        self._checkpoint = checkpoint
        self._state = checkpoint["state_dict"]
        self._lookups = _lookups(module)
        self._weights: dict[str, Any] = {key: key for key in self._lookups}
        """Key -> what is equal for all keys of one weight: layers that are tied have one each."""
        for key, parameter in module.named_parameters(remove_duplicate=False):
            self._weights[key] = id(parameter)
        if shards is not None:
            self._weights |= shards.keys_in_tree()
        self._mapped: set[str] = set()
        for table in () if shards is None else shards.tables:
            if table.mapping is not None:
                self._mapped.add(table.key)
        for name, change in growth.changed.items():
            self._change(name, change)
        self.added = set(self._keys(growth.added)) - self._state.keys()
        if growth.added:
            rank_zero_info(f"{sorted(growth.added)} are new: their tables start as they are built.")
        if growth.dropped:
            self._drop(growth.dropped)

    def _keys(self, names: Set[str]) -> list[str]:
        return [key for key, lookup in self._lookups.items() if lookup.names & names]

    def _change(self, table: str, change: Any) -> None:
        keys = self._keys(change.names)
        rows = [self._lookups[key].num_rows for key in keys]
        if min(rows, default=0) < change.rows:
            raise CheckpointError(
                f"grow=True: the rows of '{table}' change, and the module has no table of "
                f"{change.rows} rows or more for it, but {keys}. A table of torchrec needs the "
                "features' names as feature_names; another one is the module's attribute of the "
                "table's name: map its old name by checkpoint={'rename': {old: new}}."
            )
        num_rows = {}
        for key in keys:
            for name in self._keys_of_same(key):
                num_rows[name] = self._lookups[key].num_rows
        for key in num_rows:
            if key in self._mapped or key in self.rows:
                raise CheckpointError(
                    f"grow=True: the rows of '{table}' change, and in {key} they are also of ids "
                    "that are mapped in another way: a second table of features, or ids: dynamic. "
                    "Give each a table of its own."
                )
            self._replace(key, num_rows[key], change)
        self.rows += num_rows
        rank_zero_info(f"table '{table}' ({', '.join(keys)}): {change.message}.")

    def _keys_of_same(self, key: str) -> list[str]:
        return [name for name in self._weights if self._weights[name] == self._weights[key]]

    def _replace(self, key: str, num_rows: int, change: Any) -> None:
        """Let what is saved along a table's rows have the rows that it has now."""
        weight = as_lazy(self._state.get(key))
        if weight is None:
            return  # it is missing, which is an error when weights are loaded
        saved = [(self._state, key)]
        for optimizer in self._checkpoint.get("optimizer_states", ()):
            values = optimizer["state"].get(key, {})
            saved += [(values, name) for name in values]
        new_rows = torch.as_tensor(change.new_rows)
        for values, name in saved:
            lazy = as_lazy(values[name])
            # Numbers of steps, for one, have no rows.
            if lazy is not None and lazy.shape[:1] == weight.shape[:1]:
                values[name] = GrownTensor(
                    lazy,
                    num_rows,
                    change.factor,
                    new_rows,
                )

    def _drop(self, names: Set[str]) -> None:
        dropped = []
        for key in sorted(self._state.keys() - self._lookups.keys()):
            parts = ["", "", *key.split(".")]
            # torchrec's collections hold tables alone; other weights go by their name.
            if parts[-2] in names or parts[-3] in COLLECTIONS.values():
                dropped.append(key)
                del self._state[key]
        rank_zero_info(f"{sorted(names)} are no features any more: {dropped} are dropped.")


def grows(module: LightningModule) -> bool:
    """Return whether the trainer's data are to grow tables, which a fit does and a test leaves to
    it."""
    data: Any = getattr(module.trainer, "datamodule", None)
    return hasattr(data, "grown") and bool(data.grow)


def grow_tables(
    checkpoint: dict[str, Any],
    module: LightningModule,
    *,
    shards: ShardedTables | None,
    resumes: bool,
    was_trained: bool,
) -> set[str]:
    """Let data that grow go on with a checkpoint; return the keys of tables that it need not have.

    resumes: whether the optimizers' state is loaded, too. was_trained: whether the module was in a
    fit before, or has loaded weights. Raises: see GrownTables.
    """
    tables = GrownTables(checkpoint, module, shards)
    if not tables.rows:
        return tables.added
    if was_trained:
        raise CheckpointError(
            "grow=True: the module was in a fit before, or has loaded weights, so that its rows "
            "are not initial ones, with which new values begin. Build the module again."
        )
    if not resumes:
        return tables.added
    holders = []
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, AVERAGES):
            holders.append(type(callback).__name__)
    for state in checkpoint["optimizer_states"]:
        if "optimizer" not in state:
            holders.append("the optimizers' state, which another strategy has saved,")
    if holders:
        raise CheckpointError(
            f"grow=True: {holders[0]} would be of other values. Start a new run from the weights: "
            "checkpoint={'start_from': path}."
        )
    return tables.added


def start_columns(checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Let a run that starts from a checkpoint's weights map values by the columns that are in it;
    warn where there are none."""
    data: Any = getattr(module.trainer, "datamodule", None)
    name = type(data).__qualname__
    if not hasattr(data, "grown"):
        return
    if name in checkpoint:
        data.load_state_dict(checkpoint[name])
    elif data.columns.to_plain()["vocabularies"]:
        rank_zero_warn(
            f"the weights to start from are without the features of a {name}: vocabularies are "
            "those of this run's data, whose rows may be of other values than the weights' are. "
            "Start from a checkpoint of Lightning's."
        )


def _lookups(module: nn.Module) -> dict[str, _Lookup]:
    """Return the embedding tables of a module, sharded ones too, by the key of their weights."""
    lookups: dict[str, _Lookup] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for method, part in COLLECTIONS.items():
            if not hasattr(child, part) or not hasattr(child, method):
                continue
            for config in getattr(child, method)():
                key = f"{path}.{part}.{config.name}.weight"
                lookups[key] = _Lookup(config.num_embeddings, set(config.feature_names))
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            # Those of collections are there by now, with their features.
            name = path.rpartition(".")[2]
            lookups.setdefault(f"{path}.weight", _Lookup(child.num_embeddings, {name}))
    return lookups
