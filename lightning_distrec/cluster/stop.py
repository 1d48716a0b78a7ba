"""A rank that is asked to stop tells the others, and all stop after the same step."""

from typing import Protocol


class Agreement(Protocol):
    """A number that all ranks are agreeing on."""

    def wait(self) -> list[int]:
        """Return it."""


class Ranks(Protocol):
    """What this file needs of the ranks' consensus."""

    def start_least(self, *values: int) -> Agreement:
        """Collective. Begin to agree on the smallest of all ranks."""


class Stop:
    """Whether to stop. A signal's handler may call `ask` wherever the rank is: it only notes it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False
        self._agreement: Agreement | None = None
        self.agreed = False
        """Whether all ranks know it."""

    def ask(self) -> None:
        """This rank was asked to stop."""
        self._asked = True

    @property
    def is_asked(self) -> bool:
        """Whether this rank was asked; the others may not know yet."""
        return self._asked

    def step(self) -> None:
        """Collective, at each step, where no other message of the step tells the ranks.

        Read what the ranks said at the step before, and tell them of this one; nothing waits for a slow rank.
        """
        self.read()
        self._agreement = self._ranks.start_least(int(not self._asked))

    def read(self) -> None:
        """Read what the ranks said at the step before, if they did."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None and not agreement.wait()[0]:
            self.agreed = True
