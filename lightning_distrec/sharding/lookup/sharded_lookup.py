"""What a sharded collection does when the user's code calls it, in steps that can be taken before
the call.

- prepare: the features get the form that torchrec takes, and their ids are checked; nothing leaves
  the rank.
- exchange: the ids are sent to the ranks that have their rows (ids_exchange.py sends those of
  several lookups at once).
- look up: rows are looked up and sent back, with the learning rate of this step; they are awaited
  on first access.

It does the work of torchrec's forward, and returns the types, keys and column order of the
unsharded collection.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_distrec._compat.fbgemm import KernelCall, fbgemm_kernels, preserve_fbgemm_iterations
from lightning_distrec._compat.torch import reached_leaves, saved_tensors_are_hooked
from lightning_distrec._compat.torchrec_modules import (
    disable_mean_pooling_divisor,
    prepare_unequal_batches,
)
from lightning_distrec.errors import IdsError, ShardingError
from lightning_distrec.recorded_step import LIBRARY_OPERATIONS
from lightning_distrec.sharding.lookup.ids_exchange import IdsExchange, start_exchange
from lightning_distrec.sharding.lookup.jagged import DistinctIds, LookedUp, SharedBags
from lightning_distrec.sharding.lookup.lazy_outputs import (
    BackwardOrder,
    LazyJaggedTensor,
    LazyKeyedTensor,
    LazyOutput,
    PooledEmbeddings,
    SecondGradients,
)
from lightning_distrec.sharding.lookup.lookup_formats import (
    BegunFeatures,
    LookupInputs,
    LookupOutputs,
)
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup
from lightning_distrec.sharding.lookup.request import LookupConsensus, LookupRequest, form_of
from lightning_distrec.sharding.lookup.short_path import short_path_of
from lightning_distrec.sharding.lookup.weights_exchange import WeightsExchange


class ShardedLookup:
    """The forward of one sharded collection."""

    def __init__(self, setup: LookupSetup) -> None:
        self.setup = setup
        self.path = setup.path
        self.on_rows_arrived: Callable[[LookupRequest], None] | None = None
        """Called when the rows of a lookup have arrived; prefetching sets it for the time of its
        run."""
        self.meet_ranks: Callable[[str], None] | None = None
        """Called before a call that is outside of a run, which other ranks may not make."""
        self.update_watch: Any = None
        """Watches steps of tables that are updated inside of backward, under manual optimization;
        or None."""
        self.sums_gradients = False
        """Whether gradients are left on shards of tables that were fused at the start; see
        `sum_gradients`."""
        self.may_sum_gradients = False
        """Whether they may come to be, in this step."""
        tables = setup.tables
        uses = setup.uses
        self.outputs = LookupOutputs(setup)
        self.second_gradients = SecondGradients(
            setup.path, [t.full_name for t in tables if not uses[t.name].adds_up]
        )
        self.inputs = LookupInputs(setup)
        self._weights_exchange = WeightsExchange(setup, self.second_gradients)
        self._deduplicated: dict[str, int] = {}
        """Feature whose ids are sent once -> number of rows."""
        for table in tables:
            if uses[table.name].deduplicated:
                self._deduplicated |= dict.fromkeys(table.config.feature_names, table.num_ids)
        self._lazy_outputs: list[LazyOutput] = []
        self._consensus = LookupConsensus(setup.path, setup.ranks)
        self._kernels = fbgemm_kernels(setup.sharded)
        self.has_checked_gradients = False
        if setup.pooled:
            disable_mean_pooling_divisor(setup.sharded)
        calls = list(map(KernelCall, self._kernels))
        self.short_path = None
        """Where lookups go that may go the short path; alike on all ranks."""
        if setup.mapped is None and setup.has_small_ids:
            self.short_path = short_path_of(
                setup.sharded, calls, setup.ranks.num_ranks, setup.device
            )
        self._agrees_first = (
            self.short_path is not None
            or setup.needs_equal_batches
            or (setup.groups is not None and setup.groups.num_replicas > 1)
        )

    def __call__(self, make_features: Callable[[], Any]) -> LookedUp:
        """Collective. Look up the features that are made; returns what the unsharded collection
        would have returned.

        Raises on every rank what one rank cannot look up: ShardingError where a feature is missing,
        or a frozen table passes weights no gradient; IdsError where an id is out of its table's
        range, or lengths, weights, inverse indices or types do not fit; or what `make_features`
        raises. Outside of runs ShardingError where not all call.
        """
        if self.meet_ranks is not None:
            self.meet_ranks(self.path)
        with LIBRARY_OPERATIONS:
            try:
                request = self.prepare(self.inputs.begin(make_features()))
            # the others are on their way into the exchange, and must learn of it there
            except Exception as problem:
                request = LookupRequest(
                    setup=self.setup, features=self.inputs.empty(), problem=problem
                )
            # sizes must be known before ids are sent, or the exchange does not reach all ranks
            if self._agrees_first:
                request.sizes = self._consensus.agree(request, self.short_path)
                exchange = start_exchange([request])
            else:
                exchange = IdsExchange([request], self._consensus.values_to_send(request))
                request.sizes = self._consensus.agree_on(exchange.values_of_ranks(), request)
            exchange.wait()
            self.note_call(request)
            return self.look_up(request)

    def prepare(self, begun: BegunFeatures) -> LookupRequest:
        """Return the lookup of features, of which nothing has left this rank. Raises ShardingError
        as a call does.

        It goes the short path where it can.
        """
        try:
            features, late_weights, problem = self.inputs.prepare(begun)
            if self.setup.mapped is not None:
                features = self.setup.mapped.sent(features)
            bags = distinct = None
            is_variable = features.variable_stride_per_key()
            if self.setup.pooled and (
                is_variable or features.inverse_indices_or_none() is not None
            ):
                features, bags = self._share_bags(features)
        except IdsError as error:
            return LookupRequest(setup=self.setup, features=self.inputs.empty(), problem=error)
        # Batch sizes per feature do not leave the rank where each id gets a row: unsharded, the
        # rows of a feature are those of its own bags, while torchrec's sharded module spreads them
        # by inverse_indices.
        if self._deduplicated or (is_variable and not self.setup.pooled):
            distinct = DistinctIds(features, self._deduplicated)
        form = form_of(features if distinct is None else distinct.sent, late_weights is not None)
        request = LookupRequest(
            setup=self.setup,
            features=features,
            problem=problem,
            form=form,
            late_weights=late_weights,
            distinct=distinct,
            bags=bags,
        )
        # Whether features have weights, or unequal batch sizes, is a part of the form that ranks
        # agree on (request.py).
        is_weighted = features.weights_or_none() is not None
        if self.short_path is not None and not is_weighted and not is_variable:
            request.short = self.short_path.prepare(features)
        return request

    def _share_bags(
        self, features: KeyedJaggedTensor
    ) -> tuple[KeyedJaggedTensor, SharedBags | None]:
        """Return features as their bags are sent, and what expands these to examples; None:
        torchrec's module does."""
        bags = SharedBags(self.path, features)
        takes_unequal = self.setup.takes_unequal_batches and not self.may_sum_gradients
        if bags.indices and features.variable_stride_per_key() and takes_unequal:
            return bags.ordered(prepare_unequal_batches(self.setup.sharded)), None
        # Other kernels and sharding types take one batch size.
        return bags.padded(), bags

    def note_call(self, request: LookupRequest) -> None:
        """The user's code makes this lookup now."""
        # In any grad mode: a reentrant checkpoint looks up without gradients first.
        if self.setup.compare_examples is not None and request.sizes is not None:
            self.setup.compare_examples(request.num_examples, *request.sizes)
        if self.update_watch is not None:
            self.update_watch.note_call()

    def look_up(self, request: LookupRequest) -> LookedUp:
        """Collective. Look up the ids that have arrived and send the rows back; returns lazy
        outputs."""
        setup = self.setup
        outputs = self.outputs
        late = request.late_weights
        request.learns = late is not None and late.requires_grad and torch.is_grad_enabled()
        # What is frozen passes a gradient to weights that learn.
        rows = PendingRows(self, request, set() if request.learns else outputs.frozen())
        if setup.mapped is not None:
            setup.mapped.map(request.ids)
        with self._gradients(rows.frozen):
            if setup.note_used_tables is not None and not setup.pooled:
                setup.note_used_tables(rows.used)
            if request.short is not None:
                exchange: Any = request.short.path.look_up(request.short)
            else:
                ids = request.ids if late is None else self._weights_exchange.bring(request, late)
                exchange = setup.sharded.compute_and_output_dist(request.context, ids)
            output = rows.send(exchange)
        self._lazy_outputs.append(output)
        if setup.pooled:
            return LazyKeyedTensor(outputs.names, outputs.widths, output)
        return {name: LazyJaggedTensor(name, output) for name in outputs.names}

    def check_gradients(self, tensors: list[Tensor], frozen: set[str]) -> None:
        """Raise ShardingError, at the first lookup that learns, where no gradient of its rows would
        reach a table.

        An operation without a form for backward on this device makes such a gap, and the table
        would stay as it is.
        """
        if not torch.is_grad_enabled() or len(frozen) == len(self.outputs.names):
            return
        self.has_checked_gradients = True
        leaves = reached_leaves(tensors)
        reached = []
        for kernel in self._kernels:
            # fused; where gradients are kept, shards get them
            shards = [self.setup.uses[name].weight for name in kernel.table_names]
            reached.append(not leaves.isdisjoint(map(id, (*kernel.parameters(), *shards))))
        if not leaves or not (frozen or all(reached)):
            raise ShardingError(
                f"'{self.path}' was looked up for training, and no gradient of its rows reaches "
                f"{'its tables' if not any(reached) else 'some of its tables'}: they would stay as "
                "they are. Set another sharding type for them (tables={...: {'sharding_types': "
                "[...]}}), and please report this."
            )

    def state(self) -> Any:
        """Return what a lookup depends on besides its ids, rows and learning rates."""
        # Inside of an activation checkpoint, what a lookup saves for backward must be saved inside
        # too.
        return frozenset(self.outputs.frozen()), torch.is_grad_enabled(), saved_tensors_are_hooked()

    def sum_gradients(self, names: set[str]) -> None:
        """Keep the gradients of these tables from now on, by full name: several lookups in a step,
        and a loss over all rows, take no update inside of backward."""
        self.sums_gradients = True
        for table in self.setup.tables:
            if table.full_name in names:
                use = self.setup.uses[table.name]
                self.setup.uses[table.name] = replace(use, adds_up=True, in_backward=False)
                self.second_gradients.allow([table.full_name])

    def forget_gradients(self) -> None:
        """Note that an optimizer has used the gradients that have come so far."""
        self.second_gradients.forget()
        if self.setup.mapped is not None:
            self.setup.mapped.optimizer_stepped()

    def begin_step(self) -> None:
        """Forget the step before."""
        self.second_gradients.forget()
        # An exchange of rows that no code has accessed is waited for here, and does not outlive its
        # step.
        lazy_outputs = self._lazy_outputs
        self._lazy_outputs = []
        for output in lazy_outputs:
            output.get()

    @property
    def num_lookups(self) -> int:
        """How many lookups this step has made so far."""
        return len(self._lazy_outputs)

    def learning_rows(self) -> list[list[Tensor]]:
        """Return what came back from each exchange of rows in this step, tensors that require a
        gradient."""
        rows = []
        for output in self._lazy_outputs:
            output.get()
            rows.append([tensor for tensor in output.tensors if tensor.requires_grad])
        return [tensors for tensors in rows if tensors]

    @contextmanager
    def _gradients(self, frozen: set[str]) -> Iterator[None]:
        """Let gradients flow where a table learns, and leave the kernels' step counters alone where
        none does."""
        if not torch.is_grad_enabled() or len(frozen) == len(self.outputs.names):
            with torch.no_grad(), preserve_fbgemm_iterations(self._kernels):
                yield
            return
        self.setup.before_forward()
        yield


class PendingRows:
    """The rows of one lookup, until user code accesses them. frozen: outputs that pass no gradient
    back."""

    def __init__(self, lookup: ShardedLookup, request: LookupRequest, frozen: set[str]) -> None:
        self._lookup = lookup
        self._request = request
        self.frozen = frozen
        self.used: set[str] = set()
        """Names of the tables that get gradients; backward fills it."""

    def send(self, exchange: Any) -> LazyOutput:
        """Return the rows that `exchange` brings, at the place of this lookup in backward."""
        self._exchange = exchange
        self._hooks = self._lookup.second_gradients.hooks(self._lookup.update_watch)
        note_gradients = self._lookup.setup.note_gradients
        if note_gradients is not None and self._lookup.setup.pooled:
            self._hooks.append(lambda _: note_gradients(None))
        self._order = BackwardOrder()
        self._output = LazyOutput(self._wait)
        return self._output

    def _wait(self) -> PooledEmbeddings | dict[str, JaggedTensor]:
        lookup = self._lookup
        request = self._request
        outputs = self._lookup.outputs
        tensors: list[Tensor] = []
        # Columns of the short path have one node.
        with self._order.number(lambda: tensors if request.short is None else tensors[:1]):
            with LIBRARY_OPERATIONS:
                rows: Any = self._exchange.wait()
            if lookup.on_rows_arrived is not None:
                lookup.on_rows_arrived(request)
            if request.short is not None:
                tensors += rows.values()
            elif lookup.setup.pooled:
                rows = request.restore(rows, outputs.features)
                tensors.append(rows.values())
            else:
                rows = outputs.jagged(request.restore(rows, outputs.features), self.frozen)
                tensors += [jagged.values() for jagged in rows.values()]
        self._output.tensors = tensors
        if not lookup.has_checked_gradients:
            lookup.check_gradients(tensors, outputs.frozen())
        if request.short is not None:
            # The exchange calls them once for all outputs, before it sends gradients.
            self._exchange.on_gradient = self._hooks
        elif self._hooks:
            for tensor in tensors:
                for hook in self._hooks if tensor.requires_grad else ():
                    tensor.register_hook(hook)
        # Operations above are ours, which a recorder of the step leaves out; the rows are what the
        # step continues with.
        if LIBRARY_OPERATIONS.note_rows is not None:
            LIBRARY_OPERATIONS.note_rows(lookup.path, tensors)
        if lookup.setup.pooled:
            return outputs.pooled(rows, request, self.frozen, self._order)
        outputs.note_used(rows, self.used)
        return rows
