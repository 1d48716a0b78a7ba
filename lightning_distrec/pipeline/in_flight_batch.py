"""One batch under way: its lookups are prepared, their ids sent, their rows looked up, and user code takes them."""

from collections.abc import Callable
from typing import Any, Protocol

from lightning_distrec.errors import ProvenanceError
from lightning_distrec.pipeline.control_message import BatchStatus, ControlMessage
from lightning_distrec.pipeline.provenance import Call, are_unwritten, is_foreseen, stamps


class PreparedLookup(Protocol):
    """A lookup that is prepared."""

    problem: str | None
    """What is wrong with its ids on this rank, for all ranks to raise."""
    examples: int
    """This rank's number of examples."""
    sizes: tuple[int, int] | None
    """The least and the most examples of any rank, once they are known."""


class Prefetchable(Protocol):
    """A module whose calls can be foreseen."""

    early: bool
    """Whether rows may be looked up before the call: an extra forward changes nothing."""

    def prepare(self, arguments: tuple[Any, ...]) -> Any:
        """Return the Request of a call with these arguments; nothing leaves the rank."""

    def note(self, request: Any) -> None:
        """The call is made now."""

    def look_up(self, request: Any) -> Any:
        """Collective. Look up ids that have arrived; what is returned waits for the rows."""

    def state(self) -> Any:
        """Return what rows depend on beside the ids; once it has changed, rows looked up before are old."""


class Exchange(Protocol):
    """Ids of several requests on their way."""

    def send(self) -> object:
        """Collective. The sizes have travelled; let the ids follow."""

    def arrive(self) -> None:
        """Wait for the ids."""

    def drop(self) -> None:
        """Wait for what has been sent, and send no more."""


class PrefetchedLookup:
    """One call that the step will make."""

    def __init__(self, call: Call, table: Prefetchable, batch: Any) -> None:
        self.call = call
        self._table = table
        self._arguments = call.get(batch)
        self._stamps = stamps(*self._arguments)
        self.request: PreparedLookup = table.prepare(self._arguments)
        self._looked_up: Any = None
        self._state: Any = None
        self.taken = False

    def look_up(self) -> None:
        """Collective. Look the rows up before they are asked for."""
        self._state = self._table.state()
        self._looked_up = self._table.look_up(self.request)

    def is_called_with(self, arguments: tuple[Any, ...]) -> bool:
        """Whether these are the arguments that were foreseen, not written to since."""
        same = len(arguments) == len(self._arguments) and all(map(is_foreseen, arguments, self._arguments))
        return same and are_unwritten(self._stamps)

    def take(self) -> tuple[Any, bool]:
        """Collective where rows must be looked up now. Return what was looked up, and whether that was done ahead."""
        self.taken = True
        self._table.note(self.request)
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
        self.handed_out: tuple[int, int] = (0, 0)
        """batch_idx and dataloader_idx."""
        self.roots: Any = None
        """What provenance looks at: the batch, and what the module declares."""
        self.copied: Any = None
        """On a GPU, the event after which it is there."""
        self.leaves: Any = None
        """The objects of the batch, while its kind of step is not known yet."""
        self.foreseen: list[PrefetchedLookup] | None = None
        """None: nothing can be sent ahead, on some rank at least."""
        self.why_not = ""
        """Why nothing could be prepared on this rank."""
        self.exchange: Exchange | None = None
        self._message: ControlMessage | None = None
        self._read = False

    def prepare(self, calls: list[Call], tables: dict[str, Prefetchable]) -> None:
        """Prepare the lookups of the step; a batch for which they cannot be is looked up as its step calls."""
        try:
            self.foreseen = [PrefetchedLookup(call, tables[call.path], self.roots) for call in calls]
        except Exception as error:  # the step itself will raise what there is to raise, or do without
            self.foreseen = None
            self.why_not = f"{type(error).__name__}: {error}"

    @property
    def news(self) -> BatchStatus:
        """What this rank has to say of it."""
        if self.foreseen is None:
            return BatchStatus(self.state, ready=False)
        requests = [foreseen.request for foreseen in self.foreseen]
        in_range = all(request.problem is None for request in requests)
        sizes = tuple((request.examples, request.examples) for request in requests)
        return BatchStatus(self.state, ready=True, ids_in_range=in_range, sizes=sizes)

    @property
    def is_announced(self) -> bool:
        """Whether the other ranks were told of it."""
        return self._message is not None

    def announce(self, message: ControlMessage) -> None:
        """`message` speaks of this batch."""
        self._message = message
        self._read = False

    def settle(self) -> BatchStatus:
        """Return what all ranks have said of it; waits for them the first time."""
        assert self._message is not None
        news = self._message.read()
        if not self._read:
            self._read = True
            if not news.ready:
                self.foreseen = None
            for foreseen, sizes in zip(self.foreseen or [], news.sizes, strict=False):
                foreseen.request.sizes = sizes
        return news

    @property
    def problems(self) -> list[str]:
        """What is wrong with the ids on this rank."""
        return [of.request.problem for of in self.foreseen or [] if of.request.problem is not None]

    def start(self, exchange: Callable[[list[Any]], Exchange]) -> None:
        """Collective. Let the sizes of its ids travel, where they have not yet."""
        if self.exchange is None and self.foreseen and self.settle().ids_in_range:
            self.exchange = exchange([foreseen.request for foreseen in self.foreseen])

    def send(self) -> None:
        """Collective. Let its ids follow."""
        if self.exchange is not None:
            self.exchange.send()

    def take(self, path: str, arguments: tuple[Any, ...]) -> PrefetchedLookup | None:
        """Return the call that was foreseen, or None where it was not, and must be looked up as it is called.

        Raises ProvenanceError: the module's calls were foreseen with other arguments.
        """
        waiting = [foreseen for foreseen in self.foreseen or [] if foreseen.call.path == path and not foreseen.taken]
        for foreseen in waiting:
            if foreseen.is_called_with(arguments):
                return foreseen
        if not waiting:
            return None
        raise ProvenanceError(
            f"'{path}' is called with an input that is not the part of the batch it was called with in the first step, "
            "or that was written to in place since the batch was fetched; its ids have travelled ahead. Make what you "
            "look up in a method sparse_inputs(batch) of the module, or set pipeline={'depth': 1} to look tables up as "
            "they are called."
        )

    @property
    def waiting(self) -> list[PrefetchedLookup]:
        """The calls that were foreseen and not made yet."""
        return [foreseen for foreseen in self.foreseen or [] if not foreseen.taken]

    def drop(self, wait: bool) -> None:
        """Forget it; where `wait`, when what is on its way has arrived. No more is sent."""
        if wait and self.exchange is not None:
            self.exchange.drop()
        self.exchange = self.foreseen = None
