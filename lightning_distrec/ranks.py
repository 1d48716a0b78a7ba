"""What a file may need of the ranks of its job, as Protocols: cluster/consensus.py has it, tests
have simple ones."""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class MinReduction(Protocol):
    """A min all-reduce in flight."""

    received: list[list[int]]
    """What each rank has sent to this one along with it, after `wait`."""

    def wait(self) -> list[int]:
        """Return the smallest of each number."""

    def wait_up_to(self, seconds: float) -> bool:
        """Wait for the other ranks for at most `seconds`; return whether they have arrived."""


class Ranks(Protocol):
    """The ranks of a job. Every rank calls the same method in the same order."""

    rank: int
    num_ranks: int

    @property
    def group(self) -> Any:
        """The process group; None for one rank."""

    def start_all_reduce_min(self, *values: int) -> MinReduction:
        """Collective. Start a min all-reduce of each of `values`."""

    def start_min_and_exchange(
        self,
        values: tuple[int, ...],
        to_ranks: list[list[int]],
        group: Any = None,
        device: Any = None,
    ) -> MinReduction:
        """Collective. Start the same, and send each rank its entry of `to_ranks`, all of one
        length. group: of all ranks, for tensors on `device`; None: that of the ranks."""

    def all_reduce_min(self, value: int) -> int:
        """Collective. Return the smallest `value` of all ranks."""

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's `value`, in rank order. Ranks that call it in different
        functions all raise."""

    def all_or_none(self, activity: str, action: Callable[[], T]) -> T:
        """Collective. Run `action` on every rank and return its result; when it fails on one rank,
        all raise."""

    def with_flags(self, *values: int) -> tuple[int, ...]:
        """Return `values` followed by this rank's flags, for a caller that sends them by an
        exchange of its own."""

    def take_flags(self, gathered: list[list[int]]) -> list[list[int]]:
        """Return each rank's values without the flags that `with_flags` appended."""


def number_for(value: Any) -> int:
    """Return a number that is alike on ranks whose values are, to compare them by its minimum and
    its negative's."""
    # 7 bytes, so that the number and its negative fit into int64s of a message.
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")
