"""What a sharded collection does when the user's code calls it, in steps that can be taken ahead of the call.

prepare   the features get the form that torchrec knows, and their ids are checked; nothing leaves the rank
send      the ids travel to the ranks that have their rows (exchange.py sends those of several lookups together)
look up   rows are looked up and travel back, with the learning rate of this step; they are waited for when touched

In place of torchrec's forward: what comes back has the types, keys and column order of the unsharded collection.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec._compat.fbgemm import fbgemm_kernels, preserve_fbgemm_iterations
from lightning_distrec._compat.torch import saved_tensors_are_hooked
from lightning_distrec._compat.torchrec import disable_mean_pooling_divisor
from lightning_distrec.errors import IdsError, OptimizerError
from lightning_distrec.sharding.lookup.backward_order import BackwardOrder
from lightning_distrec.sharding.lookup.ids_check import IdsCheck
from lightning_distrec.sharding.lookup.ids_exchange import IdsExchange
from lightning_distrec.sharding.lookup.input_dist import InputDist
from lightning_distrec.sharding.lookup.jagged import Padding
from lightning_distrec.sharding.lookup.lazy_outputs import LazyJaggedTensor, LazyKeyedTensor, LazyOutput
from lightning_distrec.sharding.lookup.output_dist import CUT_BY_ROWS, Bags, OutputDist, TableUse
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.tables import Table

LookedUp: TypeAlias = KeyedTensor | dict[str, JaggedTensor]


class ShardedLookup:
    """The forward of one sharded collection.

    sharded: torchrec's sharded module.
    tables: the collection's tables, in its order.
    uses: name of a table -> how it is cut and updated.
    check_ids: looks at the ids before they leave the rank.
    before_forward: called before every forward that may be followed by a backward.
    output_dtype: the type of what is returned; None for the kernels' own.
    note_use: told, before a lookup of an EmbeddingCollection, where the names of tables that get gradients will be.
    compare_examples: told this rank's number of examples, and the least and most of all ranks; None: not compared.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        tables: list[Table],
        uses: Mapping[str, TableUse],
        check_ids: IdsCheck,
        before_forward: Callable[[], None],
        output_dtype: torch.dtype | None = None,
        compare_examples: Callable[[int, int, int], None] | None = None,
        note_looked_up_tables: Callable[[set[str] | None], None] | None = None,
    ) -> None:
        self.sharded = sharded
        self.path = tables[0].collection
        self._pooled = tables[0].pooled
        self._uses = uses
        self._outgoing = OutputDist(tables, uses, output_dtype)
        copies = [table.full_name for table in tables if uses[table.name].cut == "data_parallel"]
        # torchrec remembers the keys of the first call for the life of its module, which may be longer than ours.
        before = sharded.__dict__.get("forward")
        known_keys = before.keys if isinstance(before, ShardedLookup) else None
        self._incoming = InputDist(tables, copies, self._outgoing.summed_means, known_keys)
        # gloo cannot gather the gradients of unequal batches (torchrec/distributed/comm_ops.py, ReduceScatterV_Wait).
        self._equal_batches = (
            self._pooled and dist.get_backend() == "gloo" and any(use.cut in CUT_BY_ROWS for use in uses.values())
        )
        # The ids of an nn.Embedding may have any shape: they do not tell the number of examples.
        self._compare_examples = None if isinstance(tables[0].plain, torch.nn.Embedding) else compare_examples
        self._note_use = None if self._pooled else note_looked_up_tables
        self._once = [table.full_name for table in tables if not uses[table.name].adds_up]
        self._arrived: set[object] = set()
        self._arrivals: list[LazyOutput] = []
        self.rows_arrived: Callable[[LookupRequest], None] | None = None
        """Told when the rows of a lookup are here."""
        self._check_ids = check_ids
        self._before_forward = before_forward
        self._kernels = fbgemm_kernels(sharded)
        if self._pooled:
            disable_mean_pooling_divisor(sharded)

    @property
    def keys(self) -> list[str] | None:
        """The features in the order in which torchrec gets them; None before the first call."""
        return self._incoming.keys

    @torch.compiler.disable
    def __call__(self, features: KeyedJaggedTensor) -> LookedUp:
        """Collective. Look up `features`; returns what the unsharded collection would have returned.

        Raises ShardingError: a feature is missing, ids have weights that need a gradient, or features have unequal
        batch sizes where a mean-pooled table is cut by rows. Raises IdsError on every rank: an id on one rank is out
        of its table's range.
        """
        request = self.prepare(features)
        if self._equal_batches:  # sizes must be known before ids travel
            request.sizes = self._check_ids.agree(request.problem, request.examples)
        exchange = IdsExchange([request], self._check_ids.say(request.problem, request.examples))
        said = exchange.send()
        try:
            if not self._equal_batches:
                request.sizes = self._check_ids.hear(said, request.problem, request.examples)
        except IdsError:
            exchange.drop()
            raise
        exchange.arrive()
        self.note(request)
        return self.look_up(request)

    def prepare(self, features: Any) -> LookupRequest:
        """Return the lookup of `features`, of which nothing has left this rank. Raises ShardingError as a call does."""
        features = self._incoming.bring_in(features)
        features, problem = self._check_ids.look(features)
        return LookupRequest(self, features, problem)

    def pad(self, request: LookupRequest) -> None:
        """Make this rank's batch as large as the largest where it must be; `request.sizes` is known where it counts."""
        if not self._pooled:
            # torchrec cannot reshape the rows of no examples.
            if not request.features.variable_stride_per_key() and request.features.stride() == 0:
                request.padding = Padding(0, 1)
        elif self._equal_batches and request.sizes is not None and request.sizes[0] != request.sizes[1]:
            request.padding = Padding(request.features.stride(), request.sizes[1])

    def note(self, request: LookupRequest) -> None:
        """The user's code makes this lookup now."""
        # In any grad mode: a reentrant checkpoint looks up without gradients first.
        if self._compare_examples is not None and request.sizes is not None:
            self._compare_examples(request.examples, *request.sizes)

    def look_up(self, request: LookupRequest) -> LookedUp:
        """Collective. Look the ids that have arrived up and send the rows back; what is returned waits for them."""
        frozen = self._frozen()
        used: set[str] = set()
        with self._gradients(frozen):
            if self._note_use is not None:
                self._note_use(used)
            exchange = self.sharded.compute_and_output_dist(request.context, request.ids)
            arrival = LazyOutput(partial(self._arrive, request, exchange, frozen, used, BackwardOrder()))
        self._arrivals.append(arrival)
        if self._pooled:
            return LazyKeyedTensor(self._outgoing.names, self._outgoing.widths, arrival)
        return {name: LazyJaggedTensor(name, arrival) for name in self._outgoing.names}

    def state(self) -> Any:
        """Return what a lookup depends on beside its ids, rows and learning rates."""
        # Inside of a checkpoint, what a lookup saves must be saved inside too.
        return frozenset(self._frozen()), torch.is_grad_enabled(), saved_tensors_are_hooked()

    def forget_gradients(self) -> None:
        """The gradients that have come so far are used up."""
        self._arrived.clear()

    def begin_step(self) -> None:
        """Forget the step before; the exchange of rows that nobody touched must not outlive it."""
        self._arrived.clear()
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.get()

    def _arrive(
        self, request: LookupRequest, exchange: Any, frozen: set[str], used: set[str], order: BackwardOrder
    ) -> Bags | dict[str, JaggedTensor]:
        outputs: list[Tensor] = []
        with order.of(lambda: outputs):
            rows = exchange.wait()
            if self.rows_arrived is not None:
                self.rows_arrived(request)
            if request.padding is not None:
                rows = request.padding.take_off(rows) if self._pooled else request.padding.take_off_rows(rows)
            if self._pooled:
                outputs.append(rows.values())
            else:
                jagged = self._outgoing.jagged(rows, frozen)
                outputs += [of.values() for of in jagged.values()]
        self._watch(outputs)
        if self._pooled:
            return self._outgoing.bags(rows, request.features, frozen, order)
        for name, of in jagged.items():
            if of.values().requires_grad:
                of.values().register_hook(partial(_add, used, self._outgoing.table_of[name]))
        return jagged

    def _watch(self, outputs: list[Tensor]) -> None:
        """Notice when gradients come back to more than one lookup of a step, where their updates do not add up."""
        if not self._once or not any(output.requires_grad for output in outputs):
            return
        call = object()

        def arrived(gradient: Tensor) -> None:
            self._arrived.add(call)
            if len(self._arrived) > 1:
                raise OptimizerError(
                    f"gradients came to more than one lookup of '{self.path}' in a step, and table '{self._once[0]}' "
                    "is updated inside of backward, once for each lookup, which is not one update with their sum. Set "
                    "embedding_update='sparse' ('dense' for RowWiseAdagrad), or look all ids up at once."
                )

        for output in outputs:
            if output.requires_grad:
                output.register_hook(arrived)

    def _frozen(self) -> set[str]:
        """Return the outputs of the tables that do not learn now."""
        tables = {name for name, use in self._uses.items() if not use.learns()}
        if not tables:
            return tables
        return {output for output, table in self._outgoing.table_of.items() if table in tables}

    @contextmanager
    def _gradients(self, frozen: set[str]) -> Iterator[None]:
        """Let gradients flow where a table learns, and leave the kernels' step counters alone where none does."""
        if not torch.is_grad_enabled() or len(frozen) == len(self._outgoing.names):
            with torch.no_grad(), preserve_fbgemm_iterations(self._kernels):
                yield
            return
        self._before_forward()
        yield


def _add(used: set[str], table: str, gradient: Tensor | None) -> None:
    if gradient is not None:  # torch calls the hooks of all outputs of a split when any of them gets a gradient
        used.add(table)
