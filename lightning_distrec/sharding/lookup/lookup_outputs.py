"""What comes back from torchrec, made into what the unsharded collection returns: keys, column order, types, means."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec.sharding.lookup.lazy_outputs import BackwardOrder, PooledEmbeddings
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.tables import output_names
from lightning_distrec.sharding.weights.shard_access import without_guards

NEEDS_GRADIENT = attrgetter("requires_grad")


class LookupOutputs:
    """The outputs of one collection."""

    def __init__(self, setup: LookupSetup) -> None:
        tables = setup.tables
        self.names = output_names(tables)
        """The outputs in the unsharded order."""
        self.widths = [table.config.embedding_dim for table in tables for _ in table.config.feature_names]
        self.features = setup.features_of_outputs()
        table_names = [table.name for table in tables for _ in table.config.feature_names]
        self._tables = dict(zip(self.names, table_names, strict=True))
        self._summed_means = setup.summed_means
        self._replicated = setup.features_of_outputs(lambda table: setup.uses[table.name].is_replicated)
        self._output_dtype, self._note_gradients = setup.output_dtype, setup.note_gradients
        self._weights = {name: use.weight for name, use in setup.uses.items()}

    @without_guards
    def frozen(self) -> set[str]:
        """Return the outputs of the tables that are frozen now."""
        if all(map(NEEDS_GRADIENT, self._weights.values())):  # as nearly always, at no call for each table
            return set()
        tables = {name for name, weight in self._weights.items() if not weight.requires_grad}
        return {output for output, table in self._tables.items() if table in tables}

    def note_used(self, jagged: dict[str, JaggedTensor], used: set[str]) -> None:
        """Let backward add to `used` the names of the tables whose rows get gradients."""
        for name, rows in jagged.items():
            if rows.values().requires_grad:
                # Called before the kernel's backward, which reads `used`: gradients reach outputs first.
                rows.values().register_hook(partial(_add, used, self._note_gradients, self._tables[name]))

    def jagged(self, rows: dict[str, JaggedTensor], frozen: set[str]) -> dict[str, JaggedTensor]:
        """Return `rows` in the unsharded order; no gradient flows back into frozen outputs."""
        if not frozen and self._output_dtype is None:
            return {name: rows[name] for name in self.names}
        return {name: _with_values(rows[name], self._output(name, rows[name].values(), frozen)) for name in self.names}

    def pooled(
        self, rows: KeyedTensor | dict[str, Tensor], request: LookupRequest, frozen: set[str], order: BackwardOrder
    ) -> PooledEmbeddings:
        """Return `rows`, or columns by output, as the unsharded collection has them, whatever the sharding types."""
        is_final = not self._summed_means and not frozen and request.bags is None
        if isinstance(rows, KeyedTensor):
            if is_final and rows.keys() == self.names:
                with order.number(lambda: [values]):
                    values = self._typed(rows.values())
                return PooledEmbeddings(self.names, self.widths, order, values=values)
        elif is_final and self._output_dtype is None:
            return PooledEmbeddings(self.names, self.widths, order, columns={name: rows[name] for name in self.names})
        with order.number(lambda: list(columns.values())):
            columns = rows
            if isinstance(rows, KeyedTensor):
                columns = dict(zip(rows.keys(), rows.values().split(rows.length_per_key(), dim=1), strict=True))
            columns = self._columns(columns, request, frozen)
        return PooledEmbeddings(self.names, self.widths, order, columns=columns)

    def zeros(self, features: KeyedJaggedTensor, looked_up: KeyedTensor | dict[str, JaggedTensor]) -> Any:
        """Return zeros as the collection returns rows for `features`. Their gradients reach `looked_up`, as zeros."""
        if isinstance(looked_up, KeyedTensor):
            rows = looked_up.values()
            # The sum over no rows adds nothing, and connects zeros with a lookup whose backward other ranks wait for.
            zeros = rows.new_zeros(features.stride(), sum(self.widths)) + rows[:0].sum()
            return KeyedTensor(self.names, self.widths, self._typed(zeros))
        outputs = {}
        for name, width in zip(self.names, self.widths, strict=True):
            ids, rows = features[self.features[name]], looked_up[name].values()
            outputs[name] = _with_values(ids, rows.new_zeros(len(ids.values()), width) + rows[:0].sum())
        return outputs

    def _columns(self, columns: dict[str, Tensor], request: LookupRequest, frozen: set[str]) -> dict[str, Tensor]:
        if self._summed_means:
            features = request.features
            bag_sizes = features.lengths().view(len(features.keys()), -1).clamp(min=1)
            for name, feature in self._summed_means.items():
                # torchrec's own division is off: in collections of mixed types it divides other columns twice.
                columns[name] = columns[name] / bag_sizes[features.keys().index(feature)].unsqueeze(1)
        if request.bags is not None:
            columns = request.bags.expand(columns, self.features)
        return {name: self._output(name, columns[name], frozen) for name in self.names}

    def _output(self, name: str, values: Tensor, frozen: set[str]) -> Tensor:
        # A gradient that is not finite must not reach a frozen table: its kernel multiplies it by a rate of 0.
        if name in frozen:
            # Of replicated tables it is not detached: the table's own DDP waits for a gradient in every step.
            values = _ZeroGradient.apply(values) if name in self._replicated else values.detach()
        return self._typed(values)

    def _typed(self, values: Tensor) -> Tensor:
        return values if self._output_dtype is None else values.to(self._output_dtype)


def _with_values(jagged: JaggedTensor, values: Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, lengths=jagged.lengths(), weights=jagged.weights_or_none())


def _add(used: set[str], note_gradients: Callable[[str], None] | None, table: str, gradient: Tensor | None) -> None:
    if gradient is not None:  # torch calls the hooks of all outputs of a split when any of them gets a gradient
        used.add(table)
        if note_gradients is not None:
            note_gradients(table)


class _ZeroGradient(torch.autograd.Function):
    """The identity, whose gradient is zero: the table's DDP gets the gradient that it waits for, and rows stay frozen.

    Zeros, not a product with 0, which would not remove a gradient that is not finite.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(gradient)
