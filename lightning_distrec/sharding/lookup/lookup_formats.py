"""Inputs and outputs of a sharded collection, from the user's form into torchrec's and back; other
inputs are refused.

torchrec's sharded modules remember the keys of their first call, use weights that the unsharded
collection would ignore, and ignore what they do not support; here each call is brought into one
form.

Ids are checked before they are sent: an id outside of its table must not look up another row.
FBGEMM checks bounds in its kernels, but by then row-wise sharding has mapped an id that is too
large to some rank's shard, and the kernel sees a valid row of the wrong id. So the check runs on
the rank that has the batch, and ranks agree on the result.
"""

import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from lightning_distrec.errors import IdsError, ShardingError
from lightning_distrec.gpu import is_gpu
from lightning_distrec.recorded_step import LateWeights
from lightning_distrec.sharding.calls import Extremes, begin_check
from lightning_distrec.sharding.lookup.jagged import (
    LookedUp,
    contiguous,
    in_order,
    with_ids,
    with_weights,
)
from lightning_distrec.sharding.lookup.lazy_outputs import BackwardOrder, PooledEmbeddings
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.lookup.weights_exchange import with_places
from lightning_distrec.sharding.tables import feature_names, smallest_tables
from lightning_distrec.sharding.weights.shard_access import without_guards

BegunFeatures = tuple[KeyedJaggedTensor, Tensor | None, Callable[[], Extremes]]
"""Features of a call, the weights that count, and what ends their check."""


class LookupInputs:
    """The features of one collection's calls.

    Ids that are out of range: check_ids="error" raises on every rank; "warn" warns once and looks
    up row 0 in place of the id, as FBGEMM does; "ignore" looks up row 0 without a warning. A
    feature that several tables look up must be in range of the smallest of them.
    """

    def __init__(self, setup: LookupSetup) -> None:
        self._setup = setup
        self._path = setup.path
        self._name = f"'{setup.path}'"
        self._features = feature_names(setup.tables)
        plain = setup.tables[0].plain
        # nn.EmbeddingBag takes per_sample_weights, though its collection is not declared as
        # weighted.
        self._keeps_weights = setup.is_weighted or (plain is not None and setup.pooled)
        self._table_of_feature = smallest_tables(setup.tables)
        self._limits = {feature: table.num_ids for feature, table in self._table_of_feature.items()}
        self._gpu = setup.device if is_gpu(setup.device) else None
        self._warned = False

    def begin(self, features: Any) -> BegunFeatures:
        """Begin to check features. Raises ShardingError: no KeyedJaggedTensor, or weights are
        missing."""
        if not isinstance(features, KeyedJaggedTensor):
            # as unsharded, of a TensorDict; any other object stays as it is
            features = maybe_td_to_kjt(features)
        if not isinstance(features, KeyedJaggedTensor):
            raise ShardingError(
                f"'{self._path}' was called with a {type(features).__name__}; sharded tables take "
                "a KeyedJaggedTensor or a TensorDict."
            )
        weights = self._weights(features)
        return (
            features,
            weights,
            begin_check(self._name, features, weights, self._limits, self._gpu),
        )

    def prepare(
        self, begun: BegunFeatures
    ) -> tuple[KeyedJaggedTensor, Tensor | None, IdsError | None]:
        """Return the features, weights that follow them, and the error for all ranks to raise, if
        any.

        The features have the weights that count, in the order that torchrec knows, and every id in
        range. Of weights that follow their ids they have the places; see weights_exchange.py. Waits
        for a GPU. Raises ShardingError: a feature is missing. Raises IdsError: lengths, offsets,
        weights or types do not fit the ids.
        """
        features, weights, end_check = begun
        smallest, largest = end_check()
        # Only now: what makes a copy of the features, or permutes them, trusts their lengths.
        if weights is None and features.weights_or_none() is not None:
            features = with_weights(features, None)
        learned = None
        if weights is not None and (weights.requires_grad or type(weights) is LateWeights):
            learned = weights
            features = with_places(features)
        features = self._in_known_order(contiguous(features))
        # With an error, too, ids go on in range: this rank takes part in the exchange by which
        # others learn of it.
        is_bad = self._out_of_range(features, smallest, largest)
        if is_bad is None:
            return features, learned, None
        message = self._describe(features, is_bad)
        features = with_ids(features, features.values().masked_fill(is_bad, 0))
        if self._setup.check_ids == "error":
            return features, learned, IdsError(message)
        if self._setup.check_ids == "warn" and not self._warned:
            self._warned = True
            # Not on rank zero only: this rank has the ids.
            warnings.warn(
                f"{message} Row 0 is looked up in their place. This is reported once.", stacklevel=2
            )
        return features, learned, None

    def empty(self) -> KeyedJaggedTensor:
        """Return features of one example without ids."""
        keys = self._setup.known_keys.get(self._path) or self._features
        lengths = torch.zeros(len(keys), dtype=torch.int64, device=self._setup.device)
        weights = lengths.new_empty(0, dtype=torch.float32) if self._setup.is_weighted else None
        return KeyedJaggedTensor(
            keys=keys, values=lengths.new_empty(0), lengths=lengths, weights=weights, stride=1
        )

    def _weights(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Return the weights that count."""
        weights = features.weights_or_none()
        if weights is None and self._setup.is_weighted:
            raise ShardingError(
                f"'{self._path}' is weighted, and was called with ids that have no weights."
            )
        return weights if self._keeps_weights else None

    def _in_known_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = features.keys()
        order = self._setup.known_keys.get(self._path)
        if keys == order:
            return features
        if len(set(keys)) < len(keys):
            raise ShardingError(
                f"'{self._path}' was called with features of the same name: {keys}."
            )
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise ShardingError(
                f"'{self._path}' needs the features {missing}, but was called with {keys}. Give it "
                "all features of the collection; empty bags are fine."
            )
        # torchrec's module makes its input dist by the keys of its first call, and expects that
        # order from then on. The caller's order is taken where it can be, so that later batches
        # need no permutation.
        if order is None:
            order = list(keys) if set(keys) == set(self._features) else self._features
            self._setup.known_keys[self._path] = order
        return features if keys == order else in_order(features, order)

    def _out_of_range(
        self, features: KeyedJaggedTensor, smallest: int, largest: int
    ) -> Tensor | None:
        """Return which ids, (num_ids,), are out of range; None where none is. smallest, largest: of
        all ids."""
        keys = features.keys()
        values = features.values()
        limits = [self._limits[key] for key in keys]
        # Nearly every batch: two numbers that are on the host already are compared, and no tensor
        # is made.
        if smallest >= 0 and largest < min(limits):
            return None
        counts = torch.tensor(features.length_per_key(), device=values.device)
        limit_of_id = torch.tensor(limits, device=values.device).repeat_interleave(
            counts, output_size=values.numel()
        )
        is_bad = (values < 0) | (values >= limit_of_id)
        return is_bad if bool(is_bad.any()) else None

    def _describe(self, features: KeyedJaggedTensor, is_bad: Tensor) -> str:
        first = int(is_bad.nonzero()[0])
        ends = torch.tensor(features.length_per_key()).cumsum(0)
        feature = features.keys()[int((ends > first).nonzero()[0])]
        table = self._table_of_feature[feature]
        has = "has rows" if table.mapping is None else "maps the ids"
        return (
            f"feature '{feature}' of table '{table.full_name}' has the id "
            f"{int(features.values()[first])}, but the table {has} 0 to {table.num_ids - 1} "
            f"({int(is_bad.sum())} such ids in this batch on rank {self._setup.ranks.rank}). Give "
            "it more rows, map the ids, or set check_ids='warn' or 'ignore'."
        )


NEEDS_GRADIENT = attrgetter("requires_grad")


class LookupOutputs:
    """The outputs of one collection."""

    def __init__(self, setup: LookupSetup) -> None:
        self.names = list(setup.outputs)
        """The outputs in the unsharded order."""
        self.widths: list[int] = []
        self.features: dict[str, str] = {}
        self._tables: dict[str, str] = {}
        for name, (table, feature) in setup.outputs.items():
            self.widths.append(table.config.embedding_dim)
            self.features[name] = feature
            self._tables[name] = table.name
        self._summed_means = setup.summed_means
        self._uses = setup.uses
        self._output_dtype = setup.output_dtype
        self._note_gradients = setup.note_gradients
        self._weights = {name: use.weight for name, use in setup.uses.items()}

    @without_guards
    def frozen(self) -> set[str]:
        """Return the outputs of the tables that are frozen now."""
        # as nearly always, at no call for each table
        if all(map(NEEDS_GRADIENT, self._weights.values())):
            return set()
        tables = {name for name, weight in self._weights.items() if not weight.requires_grad}
        return {output for output, table in self._tables.items() if table in tables}

    def note_used(self, jagged: dict[str, JaggedTensor], used: set[str]) -> None:
        """Let backward add to `used` the names of the tables whose rows get gradients."""
        for name, rows in jagged.items():
            if rows.values().requires_grad:
                # Called before the kernel's backward, which reads `used`: gradients reach outputs
                # first.
                rows.values().register_hook(
                    partial(_add, used, self._note_gradients, self._tables[name])
                )

    def jagged(self, rows: dict[str, JaggedTensor], frozen: set[str]) -> dict[str, JaggedTensor]:
        """Return `rows` in the unsharded order; no gradient flows back into frozen outputs."""
        if not frozen and self._output_dtype is None:
            return {name: rows[name] for name in self.names}
        return {
            name: _with_values(rows[name], self._output(name, rows[name].values(), frozen))
            for name in self.names
        }

    def pooled(
        self,
        rows: KeyedTensor | dict[str, Tensor],
        request: LookupRequest,
        frozen: set[str],
        order: BackwardOrder,
    ) -> PooledEmbeddings:
        """Return `rows`, or columns by output, as the unsharded collection has them, whatever the
        sharding types."""
        is_final = not self._summed_means and not frozen and request.bags is None
        if isinstance(rows, KeyedTensor):
            if is_final and rows.keys() == self.names:
                with order.number(lambda: [values]):
                    values = self._typed(rows.values())
                return PooledEmbeddings(self.names, self.widths, order, values=values)
        elif is_final and self._output_dtype is None:
            columns = {name: rows[name] for name in self.names}
            return PooledEmbeddings(self.names, self.widths, order, columns=columns)
        with order.number(lambda: list(columns.values())):
            columns = rows.to_dict() if isinstance(rows, KeyedTensor) else rows
            columns = self._columns(columns, request, frozen)
        return PooledEmbeddings(self.names, self.widths, order, columns=columns)

    def zeros(self, features: KeyedJaggedTensor, looked_up: LookedUp) -> Any:
        """Return zeros as the collection returns rows for `features`. Their gradients reach
        `looked_up`, as zeros."""
        if isinstance(looked_up, KeyedTensor):
            rows = looked_up.values()
            # The sum over no rows adds nothing, and connects zeros with a lookup whose backward
            # other ranks wait for.
            zeros = rows.new_zeros(features.stride(), sum(self.widths)) + rows[:0].sum()
            return KeyedTensor(self.names, self.widths, self._typed(zeros))
        outputs = {}
        for name, width in zip(self.names, self.widths, strict=True):
            ids = features[self.features[name]]
            rows = looked_up[name].values()
            outputs[name] = _with_values(
                ids, rows.new_zeros(len(ids.values()), width) + rows[:0].sum()
            )
        return outputs

    def _columns(
        self, columns: dict[str, Tensor], request: LookupRequest, frozen: set[str]
    ) -> dict[str, Tensor]:
        if self._summed_means:
            features = request.features
            bag_sizes = features.lengths().view(len(features.keys()), -1).clamp(min=1)
            for name, feature in self._summed_means.items():
                # torchrec's own division is off: in collections of mixed types it divides other
                # columns twice.
                sizes = bag_sizes[features.keys().index(feature)]
                columns[name] = columns[name] / sizes.unsqueeze(1)
        if request.bags is not None:
            columns = request.bags.expand(columns, self.features)
        return {name: self._output(name, columns[name], frozen) for name in self.names}

    def _output(self, name: str, values: Tensor, frozen: set[str]) -> Tensor:
        # A gradient that is not finite must not reach a frozen table: its kernel multiplies it by a
        # rate of 0.
        if name in frozen:
            # Of replicated tables it is not detached: the table's own DDP waits for a gradient in
            # every step.
            is_replicated = self._uses[self._tables[name]].is_replicated
            values = _ZeroGradient.apply(values) if is_replicated else values.detach()
        return self._typed(values)

    def _typed(self, values: Tensor) -> Tensor:
        return values if self._output_dtype is None else values.to(self._output_dtype)


def _with_values(jagged: JaggedTensor, values: Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, lengths=jagged.lengths(), weights=jagged.weights_or_none())


def _add(
    used: set[str],
    note_gradients: Callable[[str], None] | None,
    table: str,
    gradient: Tensor | None,
) -> None:
    # torch calls the hooks of all outputs of a split when any of them gets a gradient
    if gradient is not None:
        used.add(table)
        if note_gradients is not None:
            note_gradients(table)


class _ZeroGradient(torch.autograd.Function):
    """The identity, whose gradient is zero: the table's DDP gets the gradient that it waits for,
    and rows stay frozen.

    Zeros, not a product with 0, which would not remove a gradient that is not finite.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(gradient)
