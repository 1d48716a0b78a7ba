"""The control message: one small all-reduce about every step, sent early and read later.

It carries whether every rank has the batch after the next one, whether that batch's ids are in range and can be sent
ahead, and whether the step that is running has failed on any rank.
"""

from dataclasses import dataclass

from lightning_distrec.errors import RankError
from lightning_distrec.prefetch.even_batches import HAS_BATCH
from lightning_distrec.ranks import MinReduction, Ranks

NO_FAILURE = 2**31
DIFFERING_CALL = 2**30
"""What a rank sends: that nothing failed; this plus its number where a call differs; its number where its step failed.
The smallest is received: where a step failed, ranks do not gather what differs."""
UNREADY, REFUSED = (-1, -1), (-2, -2)
"""In place of a lookup's sizes: it cannot be sent ahead in this batch, or in no later one either."""


@dataclass(frozen=True)
class BatchStatus:
    """The status of one batch: of one rank as sent, of all ranks as received. The minimum over ranks combines them."""

    state: int = HAS_BATCH
    """What the loader gave: FAILED, ENDED or HAS_BATCH."""
    ready: bool = False
    """Whether its lookups are prepared, so that their ids can be sent ahead."""
    ids_in_range: bool = True
    """Whether nothing is wrong with the ids that its lookups send."""
    form: int = 0
    """A number for the types that its lookups send. Of all ranks: that of each; else the batch is not ready."""
    sizes: tuple[tuple[int, int], ...] = ()
    """For each of its lookups the minimum and maximum number of examples over ranks; as sent, both are this rank's.
    A negative minimum: a rank has sent UNREADY or REFUSED."""
    failure: int = NO_FAILURE
    weights: int = 0
    """A number for which weights that followed their ids in the running step need a gradient."""
    weights_are_alike: bool = True
    """Whether that is one number on all ranks, as received."""
    counts: tuple[tuple[int, ...], ...] = ()
    """Lookup -> the number of its ids for each rank; once it is agreed, of those from each rank. Empty: none of the
    tables needs them."""


class ControlMessage:
    """Collective. One message of all ranks in flight. All ranks send the same number of sizes."""

    def __init__(self, ranks: Ranks, status: BatchStatus) -> None:
        # A number and its negative: their minima over ranks add up to zero where all ranks have sent the same.
        compared = (status.form, -status.form, status.weights, -status.weights)
        flags = (status.state, int(status.ready), int(status.ids_in_range), status.failure, *compared)
        # The reduction takes minima: a maximum is the negative of the minimum of negatives.
        mins = [smallest for smallest, _ in status.sizes]
        negated_maxs = [-largest for _, largest in status.sizes]
        self._reduction: MinReduction | None
        # One exchange carries flags and numbers of ids: on sockets each collective costs a round trip.
        if status.counts:
            # Transposed: each rank gets one number for each lookup. `read` transposes what has come from the ranks.
            to_ranks = [list(counts) for counts in zip(*status.counts, strict=True)]
            self._reduction = ranks.start_min_and_exchange((*flags, *mins, *negated_maxs), to_ranks)
        else:
            self._reduction = ranks.start_all_reduce_min(*flags, *mins, *negated_maxs)
        self._agreed = status

    def read(self) -> BatchStatus:
        """Return the status over all ranks; waits for them the first time."""
        if self._reduction is not None:
            state, ready, in_range, failure, form, negated_form, weights, negated_weights, *sizes = (
                self._reduction.wait()
            )
            counts = tuple(zip(*self._reduction.received, strict=True))
            self._reduction = None
            half = len(sizes) // 2
            pairs = tuple((smallest, -negated) for smallest, negated in zip(sizes[:half], sizes[half:], strict=True))
            # Where ids are out of range, all ranks raise in that step: the batch counts as ready, whatever its forms.
            ready = ready and (form == -negated_form or not in_range)
            self._agreed = BatchStatus(
                state=state,
                ready=bool(ready),
                ids_in_range=bool(in_range),
                form=form,
                sizes=pairs,
                failure=failure,
                weights=weights,
                weights_are_alike=weights == -negated_weights,
                counts=counts,
            )
        return self._agreed

    def wait_up_to(self, seconds: float) -> None:
        """Wait for the other ranks for at most `seconds`, whether they arrive or not."""
        if self._reduction is not None:
            self._reduction.wait_up_to(seconds)

    def rank_of_differing_call(self) -> int | None:
        """Return a rank on which a call differs, alike on all ranks; None: on none. Raises RankError: a rank failed."""
        failure = self.read().failure
        if failure == NO_FAILURE:
            return None
        if failure >= DIFFERING_CALL:
            return failure - DIFFERING_CALL
        raise RankError(f"rank {failure} failed inside of its step; that rank's own message says why.")
