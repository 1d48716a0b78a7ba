"""One batch in flight: its lookups are prepared, their ids sent, their rows looked up, and user code takes them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning_distrec.errors import ProvenanceError
from lightning_distrec.pipeline.control_message import BatchStatus, ControlMessage
from lightning_distrec.pipeline.learning import StepCalls
from lightning_distrec.pipeline.provenance import BatchObjects
from lightning_distrec.pipeline.same_input import are_unwritten, is_same_input, versions
from lightning_distrec.pipeline.sources import BatchRoots, LookupCall


class PreparedLookup(Protocol):
    """A lookup whose features are prepared: sharding/lookup/request.py has it."""

    problem: Exception | None
    """What is wrong with its ids on this rank, for all ranks to raise."""
    form: int
    """What must be alike on all ranks for its ids to be sent: their types."""
    num_examples: int
    """This rank's number of examples."""
    sizes: tuple[int, int] | None
    """The minimum and maximum number of examples over ranks, once they are known."""


class Prefetchable(Protocol):
    """A module whose calls can be prefetched: strategies/tables/pipelining.py has it."""

    early: bool
    """Whether rows may be looked up before the call: an extra forward changes nothing."""

    def prepare(self, arguments: tuple[Any, ...]) -> Any:
        """Return the PreparedLookup of a call with these arguments; nothing leaves the rank."""

    def note_call(self, request: Any) -> None:
        """The user's code makes this call now."""

    def look_up(self, request: Any) -> Any:
        """Collective. Look up ids that have arrived; returns lazy outputs."""

    def state(self) -> Any:
        """Return what rows depend on besides the ids; once it has changed, rows looked up before are stale."""


class Exchange(Protocol):
    """An exchange of the ids of several lookups in flight: sharding/lookup/ids_exchange.py has it."""

    def send_ids(self) -> object:
        """Collective. Wait for the sizes, and send the ids."""

    def wait(self) -> None:
        """Wait for the ids."""

    def drop(self) -> None:
        """Wait for what has been sent, and send no more."""


class PrefetchedLookup:
    """One call that the step will make."""

    def __init__(self, call: LookupCall, table: Prefetchable, roots: BatchRoots) -> None:
        self.call = call
        self._table = table
        self._arguments = call.get(roots)
        self._versions = versions(*self._arguments)
        self.request: PreparedLookup = table.prepare(self._arguments)
        self._looked_up: Any = None
        self._state: Any = None
        self.taken = False

    def look_up(self) -> None:
        """Collective. Look the rows up before the call."""
        self._state = self._table.state()
        self._looked_up = self._table.look_up(self.request)

    def is_called_with(self, arguments: tuple[Any, ...]) -> bool:
        """Whether these are the prefetched arguments, not written to since."""
        same = len(arguments) == len(self._arguments) and all(map(is_same_input, arguments, self._arguments))
        return same and are_unwritten(self._versions)

    def take(self) -> tuple[Any, bool]:
        """Collective where rows must be looked up now. Return the outputs, and whether they were looked up before."""
        self.taken = True
        self._table.note_call(self.request)
        if self._looked_up is not None and self._state == self._table.state():
            return self._looked_up, True
        return self._table.look_up(self.request), False


class InFlightBatch:
    """A batch, from the loader to the end of its step.

    kind: the kind of step it is for. state: what the loader gave: a batch, its end, or a failure.
    """

    def __init__(self, kind: str, state: int, failure: Exception | None = None) -> None:
        self.kind = kind
        self.state = state
        self.failure = failure
        self.batch: Any = None
        """As the step gets it."""
        self.loader_states: Any = None
        """The loaders' states once this batch was drawn."""
        self.indices: tuple[int, int] = (0, 0)
        """batch_idx and dataloader_idx."""
        self.roots = BatchRoots(None)
        """What provenance looks at: the batch, and what the module declares."""
        self.copied: Any = None
        """On a GPU, the event after which it is there."""
        self.objects: BatchObjects | None = None
        """The objects of the batch, until the calls of its kind of step are known."""
        self.prefetched: list[PrefetchedLookup] | None = None
        """None: nothing can be sent ahead, on some rank at least."""
        self.why_not_prepared = ""
        """Why nothing could be prepared on this rank."""
        self.exchange: Exchange | None = None
        self._message: ControlMessage | None = None
        self._is_read = False

    def prepare(self, step: StepCalls, tables: Mapping[str, Prefetchable]) -> None:
        """Prepare the lookups of the step; a batch for which they cannot be is looked up as its step calls."""
        try:
            if difference := step.order.difference(self.roots):
                raise ValueError(difference)
            self.prefetched = [PrefetchedLookup(call, tables[call.path], self.roots) for call in step.calls]
        except Exception as error:  # the step itself will raise it, or do without what is missing
            self.prefetched = None
            self.why_not_prepared = f"{type(error).__name__}: {error}"

    @property
    def own_status(self) -> BatchStatus:
        """Its status on this rank, to be sent."""
        if self.prefetched is None:
            return BatchStatus(self.state, ready=False)
        requests = [lookup.request for lookup in self.prefetched]
        in_range = all(request.problem is None for request in requests)
        sizes = tuple((request.num_examples, request.num_examples) for request in requests)
        form = 0
        for request in requests:
            form = (form * 1_000_003 + request.form) % 2**61  # of all lookups in order
        return BatchStatus(self.state, ready=True, ids_in_range=in_range, form=form, sizes=sizes)

    @property
    def is_announced(self) -> bool:
        """Whether its status was sent to the other ranks."""
        return self._message is not None

    def announce(self, message: ControlMessage) -> None:
        """Note that `message` carries the status of this batch."""
        self._message = message
        self._is_read = False

    def agreed_status(self) -> BatchStatus:
        """Return its status over all ranks; waits for them the first time. It must be announced."""
        assert self._message is not None
        status = self._message.read()
        if not self._is_read:
            self._is_read = True
            if not status.ready:
                self.prefetched = None
            for lookup, sizes in zip(self.prefetched or [], status.sizes, strict=False):
                lookup.request.sizes = sizes
        return status

    @property
    def problems(self) -> list[str]:
        """What is wrong with the ids on this rank."""
        return [str(of.request.problem) for of in self.prefetched or [] if of.request.problem is not None]

    def start_exchange(self, start: Callable[[list[Any]], Exchange]) -> None:
        """Collective. Send the sizes of its ids, where that has not been done."""
        if self.exchange is None and self.prefetched and self.agreed_status().ids_in_range:
            self.exchange = start([lookup.request for lookup in self.prefetched])

    def send_ids(self) -> None:
        """Collective. Send its ids, once their sizes are here."""
        if self.exchange is not None:
            self.exchange.send_ids()

    def find(self, path: str, arguments: tuple[Any, ...]) -> PrefetchedLookup | None:
        """Return the prefetched lookup of this call, or None: it must be looked up as it is called.

        Raises ProvenanceError: the module's calls were prefetched with other arguments.
        """
        waiting = [lookup for lookup in self.prefetched or [] if lookup.call.path == path and not lookup.taken]
        for lookup in waiting:
            if lookup.is_called_with(arguments):
                return lookup
        if not waiting:
            return None
        raise ProvenanceError(
            f"'{path}' is called with an input that is not the part of the batch it was called with in the first step, "
            "or that was written to in place since the batch was fetched; its ids have already been sent. Make what "
            "you look up in a method sparse_inputs(batch) of the module, or set pipeline={'depth': 1} to look tables "
            "up as they are called."
        )

    @property
    def waiting(self) -> list[PrefetchedLookup]:
        """The prefetched lookups that the step has not called yet."""
        return [lookup for lookup in self.prefetched or [] if not lookup.taken]

    def drop(self, wait: bool) -> None:
        """Forget it, and send no more of it. wait: whether to wait for what is in flight."""
        if wait and self.exchange is not None:
            self.exchange.drop()
        self.exchange = self.prefetched = None
