"""What prefetching needs of tables, of their lookups and of the exchange of ids."""

from typing import Any, Protocol


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
    late_weights: Any
    """Weights that follow the ids, or what stands for them until the call; None: there are none."""
    learns: bool
    """Whether these need a gradient; known once it was looked up."""
    received: tuple[int, ...] | None
    """How many ids come from each rank, once that is known."""

    @property
    def counts(self) -> list[int] | None:
        """How many ids each rank gets; None where that need not be known before they are sent."""


class Prefetchable(Protocol):
    """A module whose calls can be prefetched: strategies/tables/prefetching.py has it."""

    early: bool
    """Whether rows may be looked up before the call: an extra forward changes nothing."""
    exchanges_counts: bool
    """Whether ranks know how many ids they get before these are sent; alike on all ranks."""

    def prepare(self, arguments: tuple[Any, ...]) -> Any:
        """Return the PreparedLookup of a call with these arguments; nothing leaves the rank."""

    def note_call(self, request: Any) -> None:
        """The user's code makes this call now."""

    def give_weights(self, request: Any, arguments: tuple[Any, ...]) -> None:
        """Give a request the weights that it was prepared without."""

    def look_up(self, request: Any) -> Any:
        """Collective. Look up ids that have arrived; returns lazy outputs."""

    def zeros(self, arguments: tuple[Any, ...], looked_up: Any) -> Any:
        """Return zeros as a call with these arguments returns rows. Their gradients reach `looked_up`."""

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
