"""sparse_grads="auto": times both ways to exchange sparse gradients in the first steps, and keeps the faster."""

import statistics
import time
from collections.abc import Callable, Iterable

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_distrec.cluster.consensus import Consensus

MAX_DENSE_BYTES = 16 * 2**20
"""Gradients of larger tables are always exchanged as rows."""
TRIAL_STEPS = 8
"""Steps that are timed each way."""
WARMUP_STEPS = 2
"""Steps after a change that are not timed: DDP reorders its buckets after the first."""


def is_worth_a_trial(weights: Iterable[Tensor]) -> bool:
    """Return whether there is a table small enough to be exchanged as a dense tensor."""
    return any(weight.requires_grad and weight.nbytes <= MAX_DENSE_BYTES for weight in weights)


class SparseTrial:
    """Trains `TRIAL_STEPS` with each exchange; the one whose slowest rank is faster stays.

    every: training steps from one exchange to the next. exchange_up_to: collective; sends gradients of tables of at
    most this many bytes as dense tensors from now on. The run begins with 0.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, every: int, consensus: Consensus, exchange_up_to: Callable[[int], None]) -> None:
        self._every = every
        self._consensus = consensus
        self._exchange_up_to = exchange_up_to
        self._medians: list[float] = []
        """The median step of the slowest rank in seconds: with sparse exchange, then with dense."""
        self._seconds: list[float] = []
        self._last_step_at: float | None = None
        self._num_steps = 0

    @property
    def is_done(self) -> bool:
        """Whether both ways were timed."""
        return len(self._medians) == 2

    def before_step(self) -> None:
        """Collective where the timing of one way ends, which is at the same step on all ranks."""
        if self.is_done:
            return
        self._num_steps += 1
        if self._num_steps % self._every != 1 % self._every:
            return
        now = self.clock()
        if self._last_step_at is not None:
            self._seconds.append(now - self._last_step_at)
        self._last_step_at = now
        if len(self._seconds) == WARMUP_STEPS + TRIAL_STEPS:
            self._end_of_one_way()

    def _end_of_one_way(self) -> None:
        medians = self._consensus.all_gather(statistics.median(self._seconds[WARMUP_STEPS:]))
        self._medians.append(max(medians))
        self._seconds, self._last_step_at = [], None
        if not self.is_done:
            self._exchange_up_to(MAX_DENSE_BYTES)
            return
        sparse, dense = self._medians
        if sparse <= dense:
            self._exchange_up_to(0)
        rank_zero_info(
            f"ddp_tuned: sparse gradients are exchanged as {'rows' if sparse <= dense else 'dense tensors'}: a step "
            f"takes {1e3 * sparse:.2f} ms with rows, {1e3 * dense:.2f} ms with dense tensors."
        )


class NoSparseTrial:
    """In the place of a SparseTrial where there is nothing to try."""

    def before_step(self) -> None:
        """Do nothing."""
