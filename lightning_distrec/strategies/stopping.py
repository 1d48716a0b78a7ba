"""SIGTERM to one rank or to all: it is noted, and all ranks stop after the same step."""

from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_distrec._compat import agree_on_stop
from lightning_distrec.cluster.consensus import Agreement, Consensus


class StopTogether:
    """Takes the place of Lightning's signal handler and of its broadcast at every step, until `undo` is called.

    of_steps: the consensus for what is said once at every step.
    """

    def __init__(self, trainer: Trainer, of_steps: Consensus) -> None:
        self._of_steps = of_steps
        self._carried = of_steps.carried
        self._carried.forget()
        self._message: Agreement | None = None
        self._num_agreements = 0
        self._undo: Callable[[], None] = agree_on_stop(trainer, self._carried.ask, self.is_agreed)

    def undo(self) -> None:
        """Give Lightning its own back."""
        self._undo()
        self._carried.watch(None)

    def is_agreed(self) -> bool:
        """Collective, at each step: whether all ranks know that one was asked to stop.

        Where the step before had no agreement that could tell them, there is one for it, which is read at the next.
        """
        message, self._message = self._message, None
        if message is not None:
            message.wait()
        if self._carried.num_agreements == self._num_agreements:
            self._message = self._of_steps.start_least()
        self._num_agreements = self._carried.num_agreements
        return self._carried.is_agreed
