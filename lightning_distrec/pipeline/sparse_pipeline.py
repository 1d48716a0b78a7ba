"""The next batches' ids travel while this batch computes.

Each kind of step (training, validation of the first loader, ...) runs as it is the first time, while what its lookups
are called with is written down and found in the batch. From then on:

fetch          the batch after the next is drawn from the loader, copied to the device, and its lookups are prepared
step begins    the sizes of the next batch's ids start; this batch's ids are here, and its rows are looked up
rows are here  the next batch's ids follow: now nothing else is on the way
last lookup    the message about the batch after the next leaves
backward       the message is read
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_distrec import spans
from lightning_distrec.errors import IdsError, ProvenanceError
from lightning_distrec.pipeline.control_message import (
    BROKEN_PROVENANCE,
    FAILED_STEP,
    WELL,
    BatchStatus,
    ControlMessage,
    Ranks,
)
from lightning_distrec.pipeline.in_flight_batch import Exchange, InFlightBatch, Prefetchable
from lightning_distrec.pipeline.learning import Recorded, agree_on_calls
from lightning_distrec.pipeline.provenance import Call

FAREWELL_SECONDS = 5.0
"""How long a rank whose step failed waits for the others to hear of it."""


@dataclass
class LookupCounts:
    """Lookups of one kind of step."""

    lookups: int = 0
    ahead: int = 0
    """Those whose ids had been sent before their step began."""

    def __str__(self) -> str:
        return f"{self.ahead:,} of {self.lookups:,} lookups"


class SparsePipeline:
    """The steps of one trainer.

    depth: batches in flight, at least 2; with 3, the ranks agree about a batch a whole step before its ids travel.
    tables: path -> module whose calls can be foreseen. exchange: starts the exchange of ids.
    ids_have_their_own_group: whether ids may leave at a moment that is not the same on all ranks.
    tell: says why a table is looked up as it is called.
    """

    def __init__(
        self,
        depth: int,
        ranks: Ranks,
        tables: dict[str, Prefetchable],
        exchange: Callable[[list[Any]], Exchange],
        tell: Callable[[str], None],
        ids_have_their_own_group: bool,
    ) -> None:
        self.depth = depth
        self.ranks = ranks
        self._tables = tables
        self._exchange = exchange
        self._tell = tell
        self._own_group = ids_have_their_own_group
        self._calls: dict[str, list[Call]] = {}
        """Kind of step -> its calls that are foreseen, alike on all ranks."""
        self._complete: set[str] = set()
        """Kinds of steps of which all calls are foreseen."""
        self._current: InFlightBatch | None = None
        self._following: list[InFlightBatch] = []
        self._recorded: list[Recorded] | None = None
        self._in_step = False
        self._calls_are_foreseen = False
        self._message: ControlMessage | None = None
        self._late: set[tuple[str, int]] = set()
        """Calls of a kind of step whose rows change between its beginning and the call."""
        self._rows_due: set[int] = set()
        self._count = LookupCounts()
        self._was_sent = False
        self._told = False
        self.failed = False
        """Whether a step has failed on this rank: what is on its way must not be waited for."""
        self.counts: dict[str, LookupCounts] = {}
        """Kind of step -> its lookups so far."""

    @property
    def current(self) -> InFlightBatch | None:
        """The batch of the step that goes on, or that has just ended."""
        return self._current

    def knows(self, kind: str) -> bool:
        """Whether the first step of this kind is over."""
        return kind in self._calls

    # -- fetching

    def prepare(self, flight: InFlightBatch) -> None:
        """A batch was drawn: prepare its lookups, or keep what is needed to learn them."""
        calls = self._calls.get(flight.kind)
        if calls is not None:
            flight.prepare(calls, self._tables)
            if flight.why_not and flight.batch is not None and not self._told:
                self._told = True
                self._tell(
                    f"{flight.kind}: a batch is unlike that of the first step ({flight.why_not}); it is looked up as "
                    "its step calls, its ids do not travel ahead. Said once."
                )
        if self.depth == 2:
            self._announce(flight)

    def settle(self, flight: InFlightBatch) -> BatchStatus:
        """Collective. Return what all ranks say of a batch; asks them where that has not been done."""
        if not flight.is_announced:
            self._announce(flight)
        return flight.settle()

    def _announce(self, flight: InFlightBatch) -> None:
        flight.announce(self._message_about(flight))

    def _message_about(self, flight: InFlightBatch | None, trouble: int = WELL) -> ControlMessage:
        """Collective. All messages say as many sizes, also those of ranks that have no such batch."""
        news = BatchStatus() if flight is None else flight.news
        width = max((len(calls) for calls in self._calls.values()), default=0)
        sizes = (*news.sizes, *((0, 0),) * (width - len(news.sizes)))
        return ControlMessage(self.ranks, replace(news, sizes=sizes, trouble=trouble))

    def arm(self, current: InFlightBatch, following: list[InFlightBatch]) -> None:
        """Collective. `current` is handed out for its step; `following` come after it."""
        self.finish_step()
        self._current, self._following = current, following

    # -- a step

    def begin_step(self, batch: Any) -> None:
        """Collective. The step of `batch` begins. Raises IdsError on every rank: an id on one rank is out of range."""
        self._in_step = False
        flight = self._current
        if flight is None or batch is not flight.batch:
            return
        self._in_step = self._calls_are_foreseen = True
        self._message = None
        self._count = self.counts.setdefault(flight.kind, LookupCounts())
        if flight.kind not in self._calls:
            self._recorded = []
            return
        self._raise_problems(flight)
        following = self._following[0] if self._following else None
        if following is not None and following.kind in self._calls:
            self.settle(following)
            following.start(self._exchange)
        if not flight.foreseen:
            return
        was_sent = flight.exchange is not None
        flight.start(self._exchange)
        assert flight.exchange is not None
        flight.exchange.arrive()
        self._was_sent = was_sent
        self._rows_due = {id(foreseen.request) for foreseen in flight.foreseen}
        for i, foreseen in enumerate(flight.foreseen):
            if self._tables[foreseen.call.path].early and (flight.kind, i) not in self._late:
                foreseen.look_up()

    def _raise_problems(self, flight: InFlightBatch) -> None:
        if flight.foreseen is not None and not flight.settle().ids_in_range:
            found = [problem for of_rank in self.ranks.all_gather(flight.problems) for problem in of_rank]  # type: ignore[attr-defined]
            raise IdsError(found[0])

    def call(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """Collective. Return what was looked up for a call of the module at `path`, or None: it was not foreseen.

        Raises ProvenanceError: it was foreseen with other arguments.
        """
        flight = self._current
        if not self._calls_are_foreseen or flight is None:
            return None
        self._count.lookups += 1
        if self._recorded is not None:
            self._recorded.append(Recorded(path, arguments, flight.leaves))
            return None
        foreseen = flight.take(path, arguments)
        if foreseen is None:
            return None
        looked_up, was_ahead = foreseen.take()
        self._count.ahead += self._was_sent
        if not was_ahead:
            self._late.add((flight.kind, (flight.foreseen or []).index(foreseen)))
        if not flight.waiting:
            if not self._own_group:
                self._send_following()
            self._post()
        return looked_up

    def rows_are_here(self, request: Any) -> None:
        """The rows of a lookup have arrived: after the last one the next batch's ids may have the link."""
        if self._rows_due:
            self._rows_due.discard(id(request))
            if not self._rows_due and self._own_group:
                self._send_following()

    def before_backward(self) -> None:
        """Collective. Read the step's message. Raises ProvenanceError or RankError: another rank has trouble."""
        if not self._in_step:
            return
        self._rows_due = set()
        self._send_following()
        if self._message is not None:
            self._read()

    def end_step(self, has_backward: bool) -> None:
        """Collective. The user's step is over, but for a backward that may follow.

        Raises ProvenanceError or RankError, where no backward follows: another rank has trouble.
        """
        if not self._in_step:
            return
        self._calls_are_foreseen = False  # later ones are those of hooks, or of a backward that computes anew
        if self._recorded is not None:
            self._learn()
        self._rows_due = set()
        self._send_following()
        if self._message is None:
            self._post()
        if not has_backward:
            self._read()

    def abandon(self, failure: BaseException) -> None:
        """The step failed on this rank: meet the others at their lookups, and tell them."""
        flight = self._current
        if not self._in_step or flight is None or not isinstance(failure, Exception):
            return
        self._in_step = self._calls_are_foreseen = False
        self.failed = True
        if self._message is not None or flight.foreseen is None or flight.kind not in self._complete:
            return  # the others are, or will be, where this rank does not come
        kind = BROKEN_PROVENANCE if isinstance(failure, ProvenanceError) else FAILED_STEP
        with suppress(Exception):  # the failure that is being raised is the one to see
            for foreseen in flight.waiting:
                foreseen.take()
            self._post(trouble=self.ranks.rank * 2 + kind)
            assert self._message is not None
            self._message.wait_up_to(FAREWELL_SECONDS)

    def _post(self, trouble: int = WELL) -> None:
        """Collective. Send the step's message, with the news of the first batch that nobody has heard of."""
        unheard = next((flight for flight in self._following if not flight.is_announced), None)
        self._message = self._message_about(unheard, trouble)
        if unheard is not None:
            unheard.announce(self._message)

    def _read(self) -> None:
        assert self._message is not None
        with spans.span(spans.WAIT_CONTROL_MESSAGE):
            self._message.read()
        try:
            self._message.raise_trouble()
        except Exception:
            self.failed = True
            raise

    def finish_step(self) -> None:
        """Collective. The step is over, and its backward. Raises as `end_step`, where that has not looked."""
        if self._in_step and self._message is not None:
            self._read()
        self._in_step = False
        self._message = None

    def _send_following(self) -> None:
        if self._following:
            self._following[0].send()

    def _learn(self) -> None:
        """Collective. The first step of its kind is over: agree on what it called its tables with."""
        assert self._current is not None
        recorded, self._recorded = self._recorded or [], None
        kind = self._current.kind
        self._calls[kind], reasons = agree_on_calls(recorded, self.ranks)
        self._current.leaves = None
        if not reasons:
            self._complete.add(kind)
        for path, reason in reasons.items():
            self._tell(
                f"{kind}: '{path}' is looked up as it is called, its ids do not travel ahead: {reason}. To change "
                "that, make its input in a method sparse_inputs(batch) of the module. Said once."
            )
        for flight in self._following:
            if flight.kind == kind:
                flight.leaves = None
                flight.prepare(self._calls[kind], self._tables)
        if self._following:  # ranks whose batches end have fewer of the others: they are announced one at each step
            self._announce(self._following[0])
            self._following[0].settle()
            self._following[0].start(self._exchange)

    def drop(self, flights: list[InFlightBatch]) -> None:
        """Forget the batch of this step, and those that will not have theirs."""
        if self._message is not None and not self.failed:
            self._message.read()
        for flight in [*([self._current] if self._current is not None else []), *flights]:
            flight.drop(wait=not self.failed)
        self._current, self._following = None, []
        self._in_step = self._calls_are_foreseen = False
        self._recorded = self._message = None
