"""What a sharded collection does when the user's code calls it, in steps that can be taken before the call.

prepare    the features get the form that torchrec takes, and their ids are checked; nothing leaves the rank
exchange   the ids are sent to the ranks that have their rows (ids_exchange.py sends those of several lookups at once)
look up    rows are looked up and sent back, with the learning rate of this step; they are awaited on first access

It does the work of torchrec's forward, and returns the types, keys and column order of the unsharded collection.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_distrec._compat.fbgemm import KernelCall, fbgemm_kernels, preserve_fbgemm_iterations
from lightning_distrec._compat.torch import saved_tensors_are_hooked
from lightning_distrec._compat.torchrec import disable_mean_pooling_divisor
from lightning_distrec.errors import IdsError
from lightning_distrec.own_operations import OWN
from lightning_distrec.sharding.groups.sharding_groups import ShardingGroups
from lightning_distrec.sharding.lookup.backward_order import BackwardOrder
from lightning_distrec.sharding.lookup.distinct_ids import DistinctIds
from lightning_distrec.sharding.lookup.ids_check import IdsCheck
from lightning_distrec.sharding.lookup.ids_exchange import IdsExchange
from lightning_distrec.sharding.lookup.jagged import Padding
from lightning_distrec.sharding.lookup.lazy_outputs import LazyJaggedTensor, LazyKeyedTensor, LazyOutput
from lightning_distrec.sharding.lookup.lookup_consensus import NO_FORM, LookupConsensus, form_of
from lightning_distrec.sharding.lookup.lookup_inputs import LookupInputs
from lightning_distrec.sharding.lookup.lookup_outputs import LookupOutputs, PooledEmbeddings, TableUse
from lightning_distrec.sharding.lookup.mapped_ids import MappedIds
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.lookup.second_gradients import SecondGradients, UpdateWatch
from lightning_distrec.sharding.lookup.short_path.ids import can_go_short, short_path_of
from lightning_distrec.sharding.lookup.short_path.rows import RowsExchange
from lightning_distrec.sharding.lookup.weights_exchange import WeightsExchange
from lightning_distrec.sharding.sharding_types import ROW_TYPES
from lightning_distrec.sharding.tables import SMALL_ROWS, Table

LookedUp: TypeAlias = KeyedTensor | dict[str, JaggedTensor]


class ShardedLookup:
    """The forward of one sharded collection.

    sharded: torchrec's sharded module.
    tables: the collection's tables, in its order.
    uses: name of a table -> how it is sharded and updated.
    known_keys: collection -> the features in the order that torchrec's module knows; the first call adds it.
    check_ids: checks the ids before they leave the rank.
    before_forward: called before every forward that may be followed by a backward.
    device: of this rank.
    output_dtype: the type of what is returned; None for the kernels' own.
    compare_examples: called with this rank's number of examples, of ids for an nn.Embedding, and the minimum and
    maximum over ranks; None: ranks are not compared.
    note_used_tables: called before a lookup of an EmbeddingCollection with the set that its backward fills with the
    names of the tables that get gradients.
    groups: the ranks among which ids are exchanged; they are agreed on among all. None: all ranks.
    mapped: maps ids to rows, where a table has no fixed range of ids.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        tables: list[Table],
        uses: Mapping[str, TableUse],
        known_keys: dict[str, list[str]],
        check_ids: IdsCheck,
        before_forward: Callable[[], None],
        device: torch.device,
        output_dtype: torch.dtype | None = None,
        compare_examples: Callable[[int, int, int], None] | None = None,
        note_used_tables: Callable[[set[str] | None], None] | None = None,
        groups: ShardingGroups | None = None,
        mapped: MappedIds | None = None,
    ) -> None:
        self.sharded = sharded
        self.path = tables[0].collection
        self.on_rows_arrived: Callable[[LookupRequest], None] | None = None
        """Called when the rows of a lookup have arrived; prefetching sets it for the time of its run."""
        self.update_watch: UpdateWatch | None = None
        """Watches steps of tables that are updated inside of backward, under manual optimization."""
        self.mapped = mapped
        """Maps ids to rows; None: ids are numbers of rows."""
        self.counts_ids = isinstance(tables[0].plain, torch.nn.Embedding)
        """Whether a call does not show its number of examples, so that ids are counted."""
        self.has_small_ids = all(table.num_ids <= SMALL_ROWS for table in tables)
        """Whether ids are sent as 32-bit numbers."""
        self._pooled = tables[0].pooled
        self._outputs = LookupOutputs(tables, uses, output_dtype)
        replicated = [table.full_name for table in tables if uses[table.name].sharding_type == "data_parallel"]
        self._inputs = LookupInputs(tables, replicated, self._outputs.summed_means, known_keys)
        # gloo cannot gather the gradients of unequal batches (torchrec/distributed/comm_ops.py, ReduceScatterV_Wait).
        by_rows = any(use.sharding_type in ROW_TYPES for use in uses.values())
        self._needs_equal_batches = self._pooled and by_rows and dist.get_backend() == "gloo"
        self._agrees_first = self._needs_equal_batches or (groups is not None and groups.num_replicas > 1)
        self._compare_examples = compare_examples
        self._note_used_tables = None if self._pooled else note_used_tables
        updated_per_lookup = [table.full_name for table in tables if not uses[table.name].adds_up]
        self._second_gradients = SecondGradients(self.path, updated_per_lookup)
        divided, group = not self._inputs.is_weighted, None if groups is None else groups.sharding
        self._weights_exchange = WeightsExchange(sharded, tables, uses, divided, group, self._second_gradients)
        planned_once = (table for table in tables if uses[table.name].deduplicated)
        self._deduplicated = frozenset(feature for table in planned_once for feature in table.config.feature_names)
        self._lazy_outputs: list[LazyOutput] = []
        self._check_ids = check_ids
        self._device = device
        self._consensus = LookupConsensus(self.path, check_ids.ranks)
        self._before_forward = before_forward
        self._kernels = fbgemm_kernels(sharded)
        if self._pooled:
            disable_mean_pooling_divisor(sharded)
        calls = [KernelCall(kernel) for kernel in self._kernels]
        self._short_path = None
        if mapped is None:
            self._short_path = short_path_of(sharded, calls, self.has_small_ids, check_ids.ranks.num_ranks, device)
        self.has_short_path = self._short_path is not None
        """Whether lookups that are prefetched may go the short path; alike on all ranks."""

    @torch.compiler.disable
    def __call__(self, make_features: Callable[[], Any]) -> LookedUp:
        """Collective. Look up the features that are made; returns what the unsharded collection would have returned.

        Raises on every rank what one rank cannot look up: ShardingError where a feature is missing, a frozen table
        passes weights no gradient, or features have unequal batch sizes where a mean-pooled table is sharded by rows;
        IdsError where an id is out of its table's range, or lengths, weights or types do not fit; or what
        `make_features` raises.
        """
        with OWN:
            return self._exchange_and_look_up(make_features)

    def _exchange_and_look_up(self, make_features: Callable[[], Any]) -> LookedUp:
        try:
            request = self.prepare(make_features())
        except Exception as problem:  # the others are on their way into the exchange, and must learn of it there
            nothing = self._inputs.nothing(self._device)
            request = LookupRequest(self, nothing, problem, NO_FORM)
        if self._agrees_first:  # sizes must be known before ids are sent, or the exchange does not reach all ranks
            request.sizes = self._consensus.agree(request)
        exchange = IdsExchange([request], self._consensus.values_to_send(request))
        values = exchange.values_of_ranks()
        if not self._agrees_first:
            request.sizes = self._consensus.agree_on(values, request)
        exchange.wait()
        self.note_call(request)
        return self.look_up(request)

    def prepare(self, features: Any) -> LookupRequest:
        """Return the lookup of `features`, of which nothing has left this rank. Raises ShardingError as a call does."""
        try:
            features, smallest, largest, learned = self._inputs.prepare(features)
            features, problem_of_ids = self._check_ids.check(features, smallest, largest)
            if self.mapped is not None:
                features = self.mapped.sent(features)
        except IdsError as problem:
            return LookupRequest(self, self._inputs.nothing(self._device), problem, NO_FORM)
        request = LookupRequest(self, features, problem_of_ids, form_of(features, learned is not None), learned)
        if self._deduplicated and not features.variable_stride_per_key():
            request.distinct = DistinctIds(features, self._deduplicated)
        return request

    def prepare_ahead(self, features: Any) -> LookupRequest:
        """Return the same for a lookup that is prefetched, which goes the short path where it can."""
        request = self.prepare(features)
        if self._short_path is not None and can_go_short(request.features):
            request.short = self._short_path.prepare(request.features)
        return request

    def pad(self, request: LookupRequest) -> None:
        """Pad this rank's batch to the largest of all ranks where it must be; `request.sizes` is known then."""
        if not self._pooled:
            # torchrec cannot reshape the rows of no examples.
            features = request.features
            if not request.distinct and not features.variable_stride_per_key() and features.stride() == 0:
                request.padding = Padding(0, 1)
        elif self._needs_equal_batches and request.sizes is not None and request.sizes[0] != request.sizes[1]:
            request.padding = Padding(request.features.stride(), request.sizes[1])

    def note_call(self, request: LookupRequest) -> None:
        """The user's code makes this lookup now."""
        # In any grad mode: a reentrant checkpoint looks up without gradients first.
        if self._compare_examples is not None and request.sizes is not None:
            self._compare_examples(request.num_examples, *request.sizes)
        if self.update_watch is not None:
            self.update_watch.note_call()

    def look_up(self, request: LookupRequest) -> LookedUp:
        """Collective. Look up the ids that have arrived and send the rows back; returns lazy outputs."""
        ids, late = request.ids, request.late_weights
        request.learns = learns = late is not None and late.requires_grad and torch.is_grad_enabled()
        # What is frozen passes a gradient to weights that learn.
        frozen = set() if learns else self._outputs.frozen_now()
        used: set[str] = set()
        if self.mapped is not None:
            self.mapped.map(request.ids)
        with self._gradients(frozen):
            if self._note_used_tables is not None:
                self._note_used_tables(used)
            if request.short is not None:
                exchange: Any = request.short.look_up()
            else:
                if late is not None:
                    ids = self._weights_exchange.bring(request, late, learns)
                exchange = self.sharded.compute_and_output_dist(request.context, ids)
            hooks = self._second_gradients.hooks(self.update_watch)
            order = BackwardOrder()
            if request.short is not None:
                output = LazyOutput(partial(self._wait_for_columns, request, exchange, frozen, order, hooks))
            else:
                output = LazyOutput(partial(self._wait_for_rows, request, exchange, frozen, used, order, hooks))
        self._lazy_outputs.append(output)
        if self._pooled:
            return LazyKeyedTensor(self._outputs.names, self._outputs.widths, output)
        return {name: LazyJaggedTensor(name, output) for name in self._outputs.names}

    def zeros(self, features: Any, looked_up: LookedUp) -> LookedUp:
        """Return zeros as a lookup of `features` returns rows. Their gradients reach `looked_up`, as zeros."""
        return self._outputs.zeros(features, looked_up)  # type: ignore[no-any-return]

    def state(self) -> Any:
        """Return what a lookup depends on besides its ids, rows and learning rates."""
        # Inside of an activation checkpoint, what a lookup saves for backward must be saved inside too.
        return frozenset(self._outputs.frozen_now()), torch.is_grad_enabled(), saved_tensors_are_hooked()

    def forget_gradients(self) -> None:
        """Note that an optimizer has used the gradients that have come so far."""
        self._second_gradients.forget()
        if self.mapped is not None:
            self.mapped.optimizer_stepped()

    def begin_step(self) -> None:
        """Forget the step before; an exchange of rows that nobody accessed must not outlive it."""
        self._second_gradients.forget()
        outputs, self._lazy_outputs = self._lazy_outputs, []
        for output in outputs:
            output.get()

    def _wait_for_rows(
        self,
        request: LookupRequest,
        exchange: Any,
        frozen: set[str],
        used: set[str],
        order: BackwardOrder,
        hooks: list[Callable[[Tensor], None]],
    ) -> PooledEmbeddings | dict[str, JaggedTensor]:
        outputs: list[Tensor] = []
        with order.of(lambda: outputs):
            with OWN:
                rows = exchange.wait()
            if self.on_rows_arrived is not None:
                self.on_rows_arrived(request)
            if request.distinct is not None:
                rows = request.distinct.expand(rows, self._outputs.features)
            if request.padding is not None:
                rows = request.padding.unpad(rows) if self._pooled else request.padding.unpad_rows(rows)
            if self._pooled:
                outputs.append(rows.values())
            else:
                jagged = self._outputs.jagged(rows, frozen)
                outputs += [of.values() for of in jagged.values()]
        for output in outputs:
            for hook in hooks if output.requires_grad else ():
                output.register_hook(hook)
        if OWN.note_rows is not None:
            OWN.note_rows(self.path, outputs)
        if self._pooled:
            return self._outputs.pooled(rows, request.features, frozen, order)
        self._outputs.note_used(jagged, used)
        return jagged

    def _wait_for_columns(
        self,
        request: LookupRequest,
        exchange: RowsExchange,
        frozen: set[str],
        order: BackwardOrder,
        hooks: list[Callable[[Tensor], None]],
    ) -> PooledEmbeddings:
        columns: dict[str, Tensor] = {}
        with order.of(lambda: list(columns.values())[:1]):  # they have one node
            with OWN:
                columns.update(exchange.wait())
            if self.on_rows_arrived is not None:
                self.on_rows_arrived(request)
        exchange.on_gradient = hooks
        if OWN.note_rows is not None:
            OWN.note_rows(self.path, list(columns.values()))
        return self._outputs.of_columns(columns, request.features, frozen, order)

    @contextmanager
    def _gradients(self, frozen: set[str]) -> Iterator[None]:
        """Let gradients flow where a table learns, and leave the kernels' step counters alone where none does."""
        if not torch.is_grad_enabled() or len(frozen) == len(self._outputs.names):
            with torch.no_grad(), preserve_fbgemm_iterations(self._kernels):
                yield
            return
        self._before_forward()
        yield
