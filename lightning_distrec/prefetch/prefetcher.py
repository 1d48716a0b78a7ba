"""Prefetching: the next batch's ids are exchanged while this batch computes.

Each kind of step (training, validation of the first loader, ...) runs as it is the first time,
while the inputs of its lookups are recorded and found in the batch. From then on:

- fetch: the batch after the next one is drawn from the loader and copied to the device, and its
  lookups are prepared.
- The step begins: the sizes of the next batch's ids are sent. This batch's ids are here, and its
  rows are looked up.
- Rows arrive: the next batch's ids are sent over the free link; on NCCL at the end of forward.
- The last lookup: the control message about the batch after the next one is sent.
- backward: the control message is read.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_distrec import spans
from lightning_distrec.errors import ConfigError, ProvenanceError
from lightning_distrec.option_values import plain_fields
from lightning_distrec.prefetch.control_message import (
    DIFFERING_CALL,
    NO_FAILURE,
    BatchStatus,
    ControlMessage,
    DifferingCalls,
    WeightedCall,
)
from lightning_distrec.prefetch.in_flight_batch import (
    InFlightBatch,
    PrefetchedLookup,
    cause_of_difference,
)
from lightning_distrec.prefetch.step_calls import Learner, LookupCounts
from lightning_distrec.ranks import Ranks, number_for
from lightning_distrec.recorded_step import LIBRARY_OPERATIONS

FAILURE_NOTICE_SECONDS = 5.0
"""How long a rank whose step failed waits for the others to read its message."""
NOT_RECORDED = nullcontext()


class Step:
    """What lasts from the beginning of one step to the end of its backward. following: the batches
    after its own."""

    def __init__(
        self, batch: InFlightBatch, following: list[InFlightBatch], counts: LookupCounts
    ) -> None:
        self.batch = batch
        self.following = following
        self.counts = counts
        self.takes_prefetched = True
        """Whether user code is in its step, whose calls get what was prefetched."""
        self.was_sent = False
        """Whether its ids were sent before it began."""
        self.message: ControlMessage | None = None
        self.has_read = False
        """Whether the message was read."""
        self.pending_rows: set[int] = set()
        """Lookups, by the ids of their requests, whose rows have not arrived."""
        self.weighted_calls: list[WeightedCall] = []

    def send_following(self) -> None:
        """Collective. Send the next batch's ids, where that has not been done."""
        self.pending_rows = set()
        exchange = self.following[0].exchange if self.following else None
        if exchange is not None:
            exchange.send_ids()


@dataclass(frozen=True, kw_only=True)
class IdsExchange:
    """How ids are exchanged ahead of their step."""

    start: Callable[[list[Any]], Any]
    """Starts the exchange of the ids of prepared lookups (sharding/lookup/ids_exchange.py)."""
    has_own_group: bool
    """Whether ids may be sent at a moment that is not the same on all ranks."""
    preparing: Callable[[Callable[[], bool]], AbstractContextManager[Any]] = nullcontext
    """Returns the context in which lookups are prepared; it is given
    `StepCalls.reads_written_tensors`."""


class Prefetcher:
    """The steps of one trainer.

    depth: batches in flight, at least 2; with 3, the ranks exchange a batch's status a whole step
    before its ids.
    tables: path -> PrefetchableTable (strategies/tables/prefetching.py). learner: learns which
    calls are prefetched.
    """

    def __init__(
        self,
        depth: int,
        ranks: Ranks,
        tables: Mapping[str, Any],
        exchange: IdsExchange,
        learner: Learner,
    ) -> None:
        self.depth = depth
        self.ranks = ranks
        self._tables = tables
        self._exchange = exchange
        self._learner = learner
        self._on_gpu = any(table.on_gpu for table in tables.values())
        self._exchanges_counts = any(table.exchanges_counts for table in tables.values())
        self.current: InFlightBatch | None = None
        """The batch of the step that is running, has just ended, or is next."""
        self.following: list[InFlightBatch] = []
        """Those that come after it."""
        self._step: Step | None = None
        self._late: set[tuple[str, int]] = set()
        """Calls of a kind of step whose rows change between its beginning and the call."""
        self.differing = DifferingCalls(ranks)
        self.failed = False
        """Whether a step has failed on this rank: what is in flight must not be waited for."""
        self.counts: dict[str, LookupCounts] = {}
        """Kind of step -> its lookups so far."""

    # -- fetching

    def prepare(self, batch: InFlightBatch) -> None:
        """Prepare the lookups of a batch that was just drawn."""
        calls = self._learner.calls.get(batch.kind)
        if calls is not None:
            with self._exchange.preparing(calls.reads_written_tensors):
                batch.prepare(calls, self._tables)
            if batch.preparation_failure or batch.refused:
                self._learner.report_unprepared(batch)
        # With a depth of 2 its ids are sent in the step that begins next. With a higher one its
        # status goes along with the control message of a step.
        if self.depth == 2:
            batch.announce(self._message_about(batch))

    def agreed_status(self, batch: InFlightBatch) -> BatchStatus:
        """Collective. Return the status of a batch over all ranks."""
        if batch.message is None:
            batch.announce(self._message_about(batch))
        return batch.agreed_status()

    def _message_about(
        self, batch: InFlightBatch | None, failure: int = NO_FAILURE, weights: int = 0
    ) -> ControlMessage:
        """Collective. All messages have the same number of sizes, also those of ranks that have no
        such batch."""
        if batch is not None and self._on_gpu:
            # What depends on tensors that a step writes to was computed before.
            with self._exchange.preparing(lambda: False):
                batch.finish_preparing()
        # Padded to one width: which step a rank's batch is for may differ at the end of an epoch.
        status = BatchStatus() if batch is None else batch.own_status
        num_missing = self._learner.max_calls - len(status.sizes)
        sizes = (*status.sizes, *(0,) * num_missing)
        counts: tuple[tuple[int, ...], ...] = ()
        if self._exchanges_counts:
            none = (0,) * self.ranks.num_ranks
            # A list, not a generator, of which each item is a call.
            counts_here = [lookup_counts or none for lookup_counts in status.counts]
            counts = (*counts_here, *(none,) * num_missing)
        status = replace(status, sizes=sizes, counts=counts, failure=failure, weights=weights)
        return ControlMessage(self.ranks, status)

    # -- a step

    def begin_step(self, batch: Any) -> None:
        """Collective. Begin the step of `batch`. Raises IdsError on every rank: an id on one rank
        is out of range."""
        self._step = None
        current = self.current
        if current is None or batch is not current.batch:
            return  # no fetcher of ours has drawn it, with dataloader_iter for example
        counts = self.counts.setdefault(current.kind, LookupCounts())
        self._step = step = Step(current, self.following, counts)
        if self._learner.needs_objects(current.kind):
            self._learner.begin_step(current)
        if current.kind not in self._learner.calls:
            return
        # Agreed by all ranks, so that all of them reach the collective in `raise_problem`.
        if current.prefetched is not None and not current.agreed_status().ids_in_range:
            current.raise_problem(self.ranks)
        # Sizes leave before this batch's rows: they are small, and the ids can follow as soon as
        # the link is free.
        if self.following and self.following[0].kind in self._learner.calls:
            self.agreed_status(self.following[0])
            self.following[0].start_exchange(self._exchange.start)
        if not current.prefetched:
            return
        # In the first step of an epoch there was no step before it in which its ids could be sent.
        step.was_sent = current.exchange is not None
        current.start_exchange(self._exchange.start)
        assert current.exchange is not None
        current.exchange.wait()
        step.pending_rows = {id(lookup.request) for lookup in current.prefetched}
        for i, lookup in enumerate(current.prefetched):
            # Lookups of one table are made in the order of the calls, in which their gradients are
            # added up.
            path = lookup.call.path
            in_order = path not in current.placed_paths and lookup.request.late_weights is None
            is_late = (current.kind, i) in self._late
            if in_order and not is_late and self._tables[path].early:
                lookup.look_up()

    def recording(self) -> AbstractContextManager[None]:
        """Return the context in which the user's step runs."""
        is_recorded = self._step is not None and self._learner.is_recording
        return self._learner.recording() if is_recorded else NOT_RECORDED

    def take(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """Collective. Return what was looked up for a call of the module at `path`, or None: it was
        not prefetched.

        Where it was prefetched with other arguments: None too, if the same call differs on all
        ranks. Else zeros, and all ranks raise ProvenanceError later in the step.
        """
        step = self._step
        if step is None or not step.takes_prefetched:
            return None
        if not self._learner.is_recording:
            return self._take(step, path, arguments)
        # Our own operations are not those of the user's step: the recorder leaves them out.
        with LIBRARY_OPERATIONS:
            self._learner.note_call(path, arguments)
            return self._take(step, path, arguments)

    def _take(self, step: Step, path: str, arguments: tuple[Any, ...]) -> Any:
        current = step.batch
        step.counts.lookups += 1
        differing = self.differing
        if not differing.late.is_empty:
            differing.check_late()
        lookup, difference = current.find(path, arguments, differing.late.add)
        if lookup is None or (difference is not None and self._abandon_call(step, lookup)):
            return None
        # Also where the call differs: the other ranks take part in this lookup, and wait for this
        # rank's rows.
        looked_up, was_early = lookup.take(arguments if difference is None else None)
        step.counts.ahead += step.was_sent
        if lookup.request.late_weights is not None:
            step.weighted_calls.append(WeightedCall(path, lookup.request.learns))
        # What changes its rows before the call does so in later steps too: an early lookup would be
        # made twice.
        if not was_early:
            self._late.add((current.kind, (current.prefetched or []).index(lookup)))
        if difference is not None:
            looked_up = differing.note(difference, lambda: lookup.table.zeros(arguments, looked_up))
        if not current.waiting and step.message is None:
            # After the last step of an epoch no call would read the comparison.
            if not step.following and not differing.late.is_empty:
                differing.check_late(wait=True)
            self._send_message(step)
        return looked_up

    def _abandon_call(self, step: Step, lookup: PrefetchedLookup) -> bool:
        """Collective. Return whether this call differs on all ranks: they make it, and what
        follows, as it is called.

        The step's control message says so. A rank whose call does not differ sends it after its
        last lookup.
        """
        current = step.batch
        if step.message is not None:  # a call before this one has differed on this rank alone
            return False
        # Before that, other ranks may wait for this rank's rows.
        is_late = lookup.is_looked_up or lookup.request.late_weights is not None
        if self._tables[lookup.call.path].early and not is_late:
            lookup.look_up()
        place = (current.prefetched or []).index(lookup)
        if not self._send_message(step, DIFFERING_CALL + self.ranks.rank, -1 - place).all_differ():
            return False
        self._learner.abandon(current.kind, lookup.call, cause_of_difference(lookup.call))
        # As in a step of which nothing was prefetched: its end sends another message.
        step.message = None
        current.prefetched = []
        return True

    def rows_arrived(self, request: Any) -> None:
        """Note that the rows of a lookup are here; after the last one, send the next batch's ids
        over the free link."""
        step = self._step
        if step is not None and step.pending_rows:
            step.pending_rows.discard(id(request))
            # Rows arrive at other moments on each rank: in a group that others use too, collectives
            # would change order.
            if not step.pending_rows and self._exchange.has_own_group:
                step.send_following()

    def before_backward(self) -> None:
        """Collective. Read the control message. Raises what `end_step` does, and ShardingError:
        weights differ."""
        step = self._step
        if step is None:
            return
        step.send_following()
        if step.message is not None:
            self._read_message(step, step.message)
        else:
            self.differing.agree_on_weights(step.weighted_calls)

    def num_waiting(self) -> int:
        """Return how many lookups of the running step were prefetched, and neither looked up nor
        called yet."""
        waiting = [] if self._step is None else self._step.batch.waiting
        return len([lookup for lookup in waiting if not lookup.is_looked_up])

    def end_step(self, has_backward: bool) -> None:
        """Collective. End the user's step. Raises ProvenanceError or RankError where no backward
        follows."""
        step = self._step
        if step is None:
            return
        # Calls after the step are those of hooks, or of a backward that recomputes: none was
        # prefetched.
        step.takes_prefetched = False
        if self._learner.is_recording and self._learner.end_step():
            self._prefetch_following(step)
        self.differing.late.end_step()
        for lookup in step.batch.waiting:  # the other ranks may call what this rank's step has not
            lookup.take()
        step.send_following()
        # Not sent yet where nothing was prefetched, or where the step made fewer calls. Each rank
        # sends one in a step.
        message = step.message or self._send_message(step)
        if not has_backward:
            self._read_message(step, message)

    def abandon(self, failure: Exception) -> None:
        """Take part in the lookups that the other ranks still make, and report that the step failed
        on this rank."""
        step = self._step
        self._step = None
        if step is None:
            return
        self.failed = True
        self._learner.drop()
        if not step.batch.is_complete:
            # The others are, or will be, in a collective that this rank does not reach. Not so
            # where all ranks raise in a lookup that a call differs: on that rank the message has
            # been sent.
            if isinstance(failure, ProvenanceError) and step.message is None:
                self._send_message(step, self.ranks.rank)
            return
        with suppress(Exception):  # the failure that is being raised is the one to see
            for lookup in step.batch.waiting:
                lookup.take()
            step.send_following()  # as the others do: another fit may follow
            if step.message is None:
                self._send_message(step, self.ranks.rank).wait_up_to(FAILURE_NOTICE_SECONDS)
            elif self.differing.failure is not None and not self.differing.is_reported:
                # the others, who read it, gather what differs
                self._read_message(step, step.message)

    def _send_message(
        self, step: Step, failure: int = NO_FAILURE, weights: int = 0
    ) -> ControlMessage:
        """Collective. Send the step's control message, with the status of the first batch that was
        not announced."""
        if failure == NO_FAILURE and self.differing.failure is not None:
            failure = DIFFERING_CALL + self.ranks.rank
        unannounced = [batch for batch in step.following if batch.message is None]
        batch = unannounced[0] if unannounced else None
        if step.weighted_calls and not weights:
            weights = number_for([call.learns for call in step.weighted_calls])
        step.message = message = self._message_about(batch, failure, weights)
        step.has_read = False
        if batch is not None:
            batch.announce(message)
        return message

    def _read_message(self, step: Step, message: ControlMessage) -> None:
        step.has_read = True
        with spans.span(spans.WAIT_CONTROL_MESSAGE):
            status = message.read()
        try:
            rank = status.rank_of_differing_call()
            if rank is not None:
                self.differing.raise_failure(rank)
            if not status.weights_are_alike:
                self.differing.raise_unlike_weights(step.weighted_calls)
        except Exception:
            self.failed = True
            raise

    def finish_step(self) -> None:
        """Collective. End the step and its backward. Raises as `end_step`, where the message has
        not been read."""
        # Unread where Lightning has skipped the backward, as after a training_step that returned
        # None.
        step = self._step
        if step is not None and step.message is not None and not step.has_read:
            self._read_message(step, step.message)
        self._step = None

    def _prefetch_following(self, step: Step) -> None:
        """Collective. After the first step of a kind: prepare the batches that were drawn before
        it."""
        kind = step.batch.kind
        for batch in step.following:
            if batch.kind == kind:
                if not self._learner.needs_objects(kind):
                    batch.objects = None
                calls = self._learner.calls[kind]
                with self._exchange.preparing(calls.reads_written_tensors):
                    batch.prepare(calls, self._tables)
        # ranks whose batches end have fewer, and announce one at each step
        for batch in step.following[:1]:
            batch.announce(self._message_about(batch))
            batch.agreed_status()
            batch.start_exchange(self._exchange.start)

    def drop(self, batches: list[InFlightBatch]) -> None:
        """Forget the batch of this step, and `batches`, which will have no step."""
        if self._step is not None and self._step.message is not None and not self.failed:
            self._step.message.read()
        if self.current is not None:
            batches = [self.current, *batches]
        for batch in batches:
            batch.drop(wait=not self.failed)
        self.current = None
        self.following = []
        self._step = None
        self._learner.drop()


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions:
    """How far batches are prefetched."""

    depth: int = 3
    """Batches in flight on this rank. 1: no prefetching; tables are looked up as they are called.
    2: the next batch's ids are sent during this step. 3: the batch after it is on the device too,
    so that ranks have its status before its ids are due. Higher values hide a slower loader."""
    computed_ids: bool = True
    """Prefetch also what a step computes from its batch: its operations are recorded in its first
    steps, and repeated ahead for later batches. Off, it is looked up as the step calls."""

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.depth < 1:
            raise ConfigError(
                f"prefetch: depth={self.depth!r} must be a whole number of batches, at least 1 "
                "(off)."
            )
