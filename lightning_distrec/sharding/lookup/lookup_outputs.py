"""What comes back from torchrec, made into what the unsharded collection returns: keys, column order, types, means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec.sharding.data_parallel_tables import ZeroGradient
from lightning_distrec.sharding.lookup.backward_order import BackwardOrder
from lightning_distrec.sharding.sharding_types import ROW_TYPES
from lightning_distrec.sharding.tables import Table, output_names
from lightning_distrec.sharding.weights.shard_access import without_guards

NEEDS_GRADIENT = attrgetter("requires_grad")


@dataclass(frozen=True)
class TableUse:
    """What a lookup needs to know of a table's sharding and update."""

    sharding_type: str
    weight: torch.nn.Parameter
    """This rank's first shard, which is frozen and unfrozen with the table."""
    adds_up: bool
    """Whether two updates inside of one backward are one with the sum of their gradients."""
    in_backward: bool = False
    """Whether it is updated inside of backward."""
    deduplicated: bool = False
    """Whether repeated ids are sent once."""


class LookupOutputs:
    """The outputs of one collection.

    tables: the collection's tables, in its order. uses: name of a table -> how it is sharded and updated.
    output_dtype: the type of what is returned; None for the kernels' own.
    """

    def __init__(self, tables: list[Table], uses: Mapping[str, TableUse], output_dtype: torch.dtype | None) -> None:
        self.names = output_names(tables)
        """The outputs in the unsharded order."""
        self.widths = [table.config.embedding_dim for table in tables for _ in table.config.feature_names]
        """Their numbers of columns."""
        self.table_of = _tables_of_outputs(tables)
        """Output -> name of its table."""
        self.summed_means = _summed_means(tables, uses) if tables[0].pooled else {}
        """Output -> feature, of those that arrive as sums over ranks and are to become means."""
        self._replicated = _outputs_of(tables, lambda table: uses[table.name].sharding_type == "data_parallel")
        self.features = _outputs_of(tables, lambda _: True)
        """Output -> its feature."""
        self._output_dtype = output_dtype
        self._weights = {name: use.weight for name, use in uses.items()}

    @without_guards
    def frozen_now(self) -> set[str]:
        """Return the outputs of the tables that are frozen now."""
        if all(map(NEEDS_GRADIENT, self._weights.values())):  # as nearly always, at no call for each table
            return set()
        tables = {name for name, weight in self._weights.items() if not weight.requires_grad}
        return {output for output, table in self.table_of.items() if table in tables}

    def note_used(self, jagged: dict[str, JaggedTensor], used: set[str]) -> None:
        """Let backward add to `used` the names of the tables whose rows get gradients."""
        for name, of in jagged.items():
            if of.values().requires_grad:
                of.values().register_hook(partial(_add, used, self.table_of[name]))

    def jagged(self, rows: dict[str, JaggedTensor], frozen: set[str]) -> dict[str, JaggedTensor]:
        """Return `rows` in the unsharded order; no gradient flows back into frozen outputs."""
        if not frozen and self._output_dtype is None:
            return {name: rows[name] for name in self.names}
        return {
            name: _with_values(rows[name], self._typed(self._frozen(name, values) if name in frozen else values))
            for name in self.names
            for values in [rows[name].values()]
        }

    def pooled(
        self, rows: KeyedTensor, features: KeyedJaggedTensor, frozen: set[str], order: BackwardOrder
    ) -> "PooledEmbeddings":
        """Return `rows` as the unsharded collection has them, whatever the sharding types."""
        if rows.keys() == self.names and not self.summed_means and not frozen:
            with order.of(lambda: [values]):
                values = self._typed(rows.values())
            return PooledEmbeddings(self.names, self.widths, order, values=values)
        with order.of(lambda: list(columns.values())):
            columns = dict(zip(rows.keys(), rows.values().split(rows.length_per_key(), dim=1), strict=True))
            columns = self._columns(columns, features, frozen)
        return PooledEmbeddings(self.names, self.widths, order, columns=columns)

    def of_columns(
        self, columns: dict[str, torch.Tensor], features: KeyedJaggedTensor, frozen: set[str], order: BackwardOrder
    ) -> "PooledEmbeddings":
        """Return `columns`, by output, as `pooled` does."""
        if self.summed_means or frozen or self._output_dtype is not None:
            with order.of(lambda: list(columns.values())):
                columns = self._columns(columns, features, frozen)
        else:
            columns = {name: columns[name] for name in self.names}
        return PooledEmbeddings(self.names, self.widths, order, columns=columns)

    def zeros(self, features: KeyedJaggedTensor, looked_up: KeyedTensor | dict[str, JaggedTensor]) -> Any:
        """Return zeros as the collection returns rows for `features`. Their gradients reach `looked_up`, as zeros."""
        if isinstance(looked_up, KeyedTensor):
            rows = looked_up.values()
            zeros = rows.new_zeros(features.stride(), sum(self.widths)) + rows[:0].sum()
            return KeyedTensor(self.names, self.widths, self._typed(zeros))
        found = {}
        for name, width in zip(self.names, self.widths, strict=True):
            ids, rows = features[self.features[name]], looked_up[name].values()
            found[name] = _with_values(ids, rows.new_zeros(len(ids.values()), width) + rows[:0].sum())
        return found

    def _columns(
        self, columns: dict[str, torch.Tensor], features: KeyedJaggedTensor, frozen: set[str]
    ) -> dict[str, torch.Tensor]:
        if self.summed_means:
            bag_sizes = features.lengths().view(len(features.keys()), -1).clamp(min=1)
            for name, feature in self.summed_means.items():
                columns[name] = columns[name] / bag_sizes[features.keys().index(feature)].unsqueeze(1)
        # A gradient that is not finite must not reach a frozen table: its kernel multiplies it by a rate of 0.
        if frozen:
            columns |= {name: self._frozen(name, columns[name]) for name in frozen}
        if self._output_dtype is None:
            return {name: columns[name] for name in self.names}
        return {name: self._typed(columns[name]) for name in self.names}

    def _frozen(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name in self._replicated:
            # Not detached: the table's own DDP waits for a gradient in every step.
            with_zero_gradient: torch.Tensor = ZeroGradient.apply(values)
            return with_zero_gradient
        return values.detach()

    def _typed(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._output_dtype is None else values.to(self._output_dtype)


class PooledEmbeddings:
    """Pooled embeddings by output, and all of them concatenated; each is made of the other on first access.

    torchrec groups columns by sharding type, so that concatenating costs a copy, in forward and in backward.
    order: of backward. columns: output -> (batch_size, width), in order. values: (batch_size, sum(widths)).
    """

    def __init__(
        self,
        names: list[str],
        widths: list[int],
        order: BackwardOrder,
        columns: dict[str, torch.Tensor] | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        self._names, self._widths, self._order = names, widths, order
        self._columns, self._values = columns, values

    @property
    def values(self) -> torch.Tensor:
        """All of them concatenated, in the unsharded order."""
        if self._values is None:
            # In grad mode, as LazyOutput: code that first looks at them under no_grad may use them in its loss later.
            with torch.enable_grad(), self._order.of(lambda: [values]):
                values = torch.cat(list(self.columns.values()), dim=1)
            self._values = values
        return self._values

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """Output -> its columns."""
        if self._columns is None:
            with torch.enable_grad(), self._order.of(lambda: list(columns)):
                columns = self.values.split(self._widths, dim=1)
            self._columns = dict(zip(self._names, columns, strict=True))
        return self._columns


def _summed_means(tables: list[Table], uses: Mapping[str, TableUse]) -> dict[str, str]:
    def summed(table: Table) -> bool:
        return table.config.pooling == PoolingType.MEAN and uses[table.name].sharding_type in ROW_TYPES

    return _outputs_of(tables, summed)


def _tables_of_outputs(tables: list[Table]) -> dict[str, str]:
    names = [table.name for table in tables for _ in table.config.feature_names]
    return dict(zip(output_names(tables), names, strict=True))


def _outputs_of(tables: list[Table], chosen: Callable[[Table], bool]) -> dict[str, str]:
    """Return output -> feature for the tables that are chosen."""
    outputs = iter(output_names(tables))
    triples = [(table, feature, next(outputs)) for table in tables for feature in table.config.feature_names]
    return {output: feature for table, feature, output in triples if chosen(table)}


def _with_values(jagged: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, lengths=jagged.lengths(), weights=jagged.weights_or_none())


def _add(used: set[str], table: str, gradient: torch.Tensor | None) -> None:
    if gradient is not None:  # torch calls the hooks of all outputs of a split when any of them gets a gradient
        used.add(table)
