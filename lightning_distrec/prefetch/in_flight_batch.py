"""One batch in flight: its lookups are prepared, their ids sent, their rows looked up, and user
code takes them."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from lightning_distrec.errors import IdsError, ProvenanceError
from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.computed_calls import ComputedCall, replaying
from lightning_distrec.prefetch.control_message import (
    UNREADY,
    BatchStatus,
    ControlMessage,
    with_form,
)
from lightning_distrec.prefetch.recorded_calls import PrefetchedCall, StepCalls
from lightning_distrec.prefetch.sources import (
    BatchRoots,
    Compare,
    are_unwritten,
    is_same_input,
    versions,
)
from lightning_distrec.ranks import Ranks


class PrefetchedLookup:
    """One call that the step will make. table: a PrefetchableTable
    (strategies/tables/prefetching.py)."""

    def __init__(self, call: PrefetchedCall, table: Any, roots: BatchRoots) -> None:
        self.call = call
        self.table = table
        self._arguments = call.get(roots)
        self._versions = versions(*self._arguments)
        self._begun = table.begin(self._arguments)
        self.request: Any = None if table.on_gpu else table.prepare(self._begun)
        """Its LookupRequest, once it is prepared. Its `late_weights`, which the step computes,
        follow the ids."""
        self._looked_up: Any = None
        self._state: Any = None
        self.is_taken = False

    def finish_preparing(self) -> None:
        """Prepare what was only begun."""
        if self.request is None:
            self.request = self.table.prepare(self._begun)

    def look_up(self) -> None:
        """Collective. Look the rows up before the call."""
        self._state = self.table.state()
        self._looked_up = self.table.look_up(self.request)

    def is_called_with(self, arguments: tuple[Any, ...], compare: Compare | None) -> bool:
        """Whether these are the prefetched arguments, not written to since. compare: as of
        `is_same_input`."""
        if len(arguments) != len(self._arguments):
            return False
        # On a GPU numbers are compared for computed inputs only; what was found in the batch must
        # be the same memory.
        compare = compare if isinstance(self.call, ComputedCall) else None
        for argument, prefetched in zip(arguments, self._arguments, strict=True):
            if not is_same_input(argument, prefetched, compare):
                return False
        return are_unwritten(self._versions)

    @property
    def is_looked_up(self) -> bool:
        """Whether its rows were looked up before the call."""
        return self._looked_up is not None

    def take(self, arguments: tuple[Any, ...] | None = None) -> tuple[Any, bool]:
        """Collective. Return the outputs, and whether they were looked up before. arguments: None
        where they differ."""
        self.is_taken = True
        self.table.note_call(self.request)
        if self.request.late_weights is not None and arguments is not None:
            self.table.give_weights(self.request, arguments)
        # Under manual optimization an optimizer may have stepped since the rows were looked up. The
        # state is alike on all ranks: either all of them look up again or none does.
        if self._looked_up is not None and self._state == self.table.state():
            return self._looked_up, True
        return self.table.look_up(self.request), False


class InFlightBatch:
    """A batch, from the loader to the end of its step. state: what the loader gave: a batch, its
    end, or a failure."""

    def __init__(self, kind: str, state: int, failure: Exception | None = None) -> None:
        self.kind = kind
        self.state = state
        self.failure = failure
        self.batch: Any = None
        self.loader_states: Any = None
        self.indices: tuple[int, int] = (0, 0)
        self.is_repeated = False  # for other ranks' batches, after the last one of this rank
        self.roots = BatchRoots(None)
        """What provenance looks at: the batch, and what the module declares."""
        self.copied: Any = None
        """On a GPU, the event after which it is there."""
        self.objects: BatchObjects | None = None
        """The objects of the batch, until the calls of its kind of step are known."""
        self.prefetched: list[PrefetchedLookup] | None = None
        """None: nothing can be sent ahead, on some rank at least."""
        self.preparation_failure = ""
        self.refused: list[ComputedCall] = []
        """Calls of which this rank knows that no later batch's input can be computed either."""
        self.exchange: Any = None
        """Of its ids, in flight (sharding/lookup/ids_exchange.py)."""
        self._step: StepCalls | None = None
        self._lookups: list[PrefetchedLookup | None] = []
        """For each call of the step its lookup on this rank, None where it is unready."""
        self.placed_paths: set[str] = set()
        """Tables of which some calls are prefetched: a call is distinguished by how many come
        before it."""
        self._places: dict[str, int] = {}
        self.message: ControlMessage | None = None
        """Carries its status; None: that was not sent to the other ranks."""
        self._agreed: BatchStatus | None = None

    def prepare(self, step: StepCalls, tables: Mapping[str, Any]) -> None:
        """Prepare the lookups of the step; those that cannot be are looked up as the step calls."""
        self._step = step
        try:
            difference = step.order.difference(self.roots)
            if difference:
                raise ValueError(difference)
            # Tensors that are made in inference mode do not count writes in place.
            with replaying() if step.computes else torch.inference_mode(False):
                computes = step.computes and step.computes_from(self.roots)
                self._lookups = []
                for call in step.calls:
                    self._lookups.append(self._prepared(call, tables[call.path], computes))
            self.prefetched = [lookup for lookup in self._lookups if lookup is not None]
        except Exception as error:
            self._fail(error)
        # The lookups have what they need; the memo would hold intermediate results until the step
        # of this batch.
        self.roots.memo.clear()

    def _prepared(
        self, call: PrefetchedCall, table: Any, computes: bool
    ) -> PrefetchedLookup | None:
        if not isinstance(call, ComputedCall):
            return PrefetchedLookup(call, table, self.roots)
        try:
            return PrefetchedLookup(call, table, self.roots) if computes else None
        except Exception:  # it is looked up as the step calls
            if call.refused:
                self.refused.append(call)
            return None

    def finish_preparing(self) -> None:
        """Prepare the lookups that were only begun, since a GPU had not got the batch yet. Waits
        for it."""
        try:
            with replaying():
                for lookup in self.prefetched or []:
                    lookup.finish_preparing()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # The step itself will raise it, or do without what is missing.
        self.prefetched = None
        self.preparation_failure = f"{type(error).__name__}: {error}"

    @property
    def own_status(self) -> BatchStatus:
        """Its status on this rank, to be sent."""
        if self.prefetched is None:
            return BatchStatus(self.state, ready=False)
        in_range = True
        sizes: list[int] = []
        counts: list[tuple[int, ...]] = []
        for lookup in self._lookups:
            if lookup is None:
                sizes.append(UNREADY)
                counts.append(())
            else:
                request = lookup.request
                in_range = in_range and request.problem is None
                sizes.append(with_form(request.num_examples, request.form))
                counts.append(tuple(request.counts or ()))
        return BatchStatus(
            self.state, ready=True, ids_in_range=in_range, sizes=tuple(sizes), counts=tuple(counts)
        )

    def announce(self, message: ControlMessage) -> None:
        """Note that `message` carries the status of this batch."""
        self.message = message
        self._agreed = None

    def agreed_status(self) -> BatchStatus:
        """Return its status over all ranks; waits for them the first time. It must be announced."""
        if self._agreed is None:
            assert self.message is not None
            self._agreed = self.message.read()
            if not self._agreed.ready:
                self.prefetched = None
            elif self._step is not None:
                self._take_sizes(self._step, self._agreed)
        return self._agreed

    def _take_sizes(self, step: StepCalls, status: BatchStatus) -> None:
        # Decided by the agreed sizes, so that all ranks send the ids of the same lookups in one
        # exchange.
        ready: list[int] = []
        unready_paths: set[str] = set()
        for i, call in enumerate(step.calls):
            if status.size_ranges[i][0] < 0:
                unready_paths.add(call.path)
            else:
                ready.append(i)
        self.prefetched = []
        self.placed_paths = step.placed_paths | unready_paths
        for i in ready:
            path = step.calls[i].path
            lookup = self._lookups[i]
            if lookup is not None and (path in step.regular or path not in unready_paths):
                lookup.request.sizes = status.size_ranges[i]
                lookup.request.received = status.counts[i] if status.counts else ()
                self.prefetched.append(lookup)

    @property
    def is_complete(self) -> bool:
        """Whether all lookups of its step are prefetched."""
        if self._step is None or self.prefetched is None:
            return False
        return self._step.is_complete and len(self.prefetched) == len(self._lookups)

    def raise_problem(self, ranks: Ranks) -> None:
        """Collective. Raise IdsError: what is wrong with the ids on one of the ranks."""
        problems: list[str] = []
        for lookup in self._lookups:
            if lookup is not None and lookup.request.problem is not None:
                problems.append(str(lookup.request.problem))
        gathered = ranks.all_gather(problems)
        raise IdsError(next(chain.from_iterable(gathered)))

    def start_exchange(self, start: Callable[[list[Any]], Any]) -> None:
        """Collective. Send the sizes of its ids, where that has not been done."""
        # Where ids are out of range nothing is sent: all ranks raise when that batch's step begins.
        if self.exchange is None and self.prefetched and self.agreed_status().ids_in_range:
            self.exchange = start([lookup.request for lookup in self.prefetched])

    def find(
        self, path: str, arguments: tuple[Any, ...], compare: Compare | None = None
    ) -> tuple[PrefetchedLookup | None, ProvenanceError | None]:
        """Return the prefetched lookup of this call, or None; the error: it was prefetched with
        other arguments."""
        place = None
        # Counted for calls that were not prefetched too, since all ranks make them. Another call
        # may have the same input by chance, but not on all ranks.
        if path in self.placed_paths:
            place = self._places.get(path, 0)
            self._places[path] = place + 1
        first: PrefetchedLookup | None = None
        for lookup in self.prefetched or ():
            if lookup.is_taken or lookup.call.path != path:
                continue
            if place is not None and getattr(lookup.call, "place", None) != place:
                continue
            if lookup.is_called_with(arguments, compare):
                return lookup, None
            first = first or lookup
        if first is None:
            return None, None
        return first, ProvenanceError(_describe_difference(first.call))

    @property
    def waiting(self) -> list[PrefetchedLookup]:
        """The prefetched lookups that the step has not called yet."""
        # A loop, not a comprehension, which is a call more in every lookup.
        waiting = []
        for lookup in self.prefetched or ():
            if not lookup.is_taken:
                waiting.append(lookup)
        return waiting

    def drop(self, wait: bool) -> None:
        """Forget it, and send no more of it. wait: whether to wait for what is in flight."""
        if wait and self.exchange is not None:
            self.exchange.drop()
        self.exchange = self.prefetched = None


def cause_of_difference(call: PrefetchedCall) -> str:
    """Return why a step may call a table with something else than what was prefetched."""
    if isinstance(call, ComputedCall):
        return (
            "another input than its operations computed ahead of the step; something that they "
            "depend on has changed since the first steps"
        )
    return (
        "an input that is not the part of the batch it was called with in the first step, or that "
        "was written to in place since the batch was fetched"
    )


def _describe_difference(call: PrefetchedCall) -> str:
    option = "{'computed_ids': False}" if isinstance(call, ComputedCall) else "{'depth': 1}"
    return (
        f"'{call.path}' is called with {cause_of_difference(call)}; its ids have already been "
        "sent, and other ranks call it as before. Make what you look up in a method "
        f"sparse_inputs(batch) of the module, or set prefetch={option} to look it up as it is "
        "called."
    )
