"""What ranks send each other in a step: the status of a batch to come, and that a call differs from
the prefetched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_distrec import gpu
from lightning_distrec.errors import ProvenanceError, RankError, ShardingError
from lightning_distrec.prefetch.even_batches import HAS_BATCH
from lightning_distrec.ranks import MinReduction, Ranks, number_for

NO_FAILURE = 2**31
DIFFERING_CALL = 2**30
"""What a rank sends: that nothing failed; this plus its number where a call differs; its number
where its step failed. The smallest is received: where a step failed, ranks do not gather what
differs."""
UNREADY = -1
"""In place of a lookup's size: it cannot be sent ahead in this batch."""
FORM = 2**40
"""A size is sent with the number for its lookup's types, multiplied by this."""


@dataclass(frozen=True)
class BatchStatus:
    """The status of one batch: of one rank as sent, of all ranks as received. The minimum over
    ranks combines them."""

    state: int = HAS_BATCH
    """What the loader gave: FAILED, ENDED or HAS_BATCH."""
    ready: bool = False
    """Whether its lookups are prepared, so that their ids can be sent ahead."""
    ids_in_range: bool = True
    """Whether nothing is wrong with the ids that its lookups send."""
    sizes: tuple[int, ...] = ()
    """For each of its lookups the number of examples on this rank and its types: `with_form`."""
    size_ranges: tuple[tuple[int, int], ...] = ()
    """As received: for each lookup the minimum and maximum number of examples over ranks. A
    negative minimum: a rank has sent UNREADY, or types differ."""
    failure: int = NO_FAILURE
    weights: int = 0
    """A number for which weights that followed their ids in the running step need a gradient;
    negative: for the lookup whose call differs on this rank."""
    weights_are_alike: bool = True
    """Whether that is one number on all ranks, as received."""
    counts: tuple[tuple[int, ...], ...] = ()
    """Lookup -> the number of its ids for each rank; once it is agreed, of those from each rank.
    Empty: none of the tables needs them."""

    def rank_of_differing_call(self) -> int | None:
        """Return a rank on which a call differs, alike on all ranks; None: on none. Raises
        RankError: a rank failed."""
        if self.failure == NO_FAILURE:
            return None
        if self.failure >= DIFFERING_CALL:
            return self.failure - DIFFERING_CALL
        raise RankError(
            f"rank {self.failure} failed inside of its step; that rank's own message says why."
        )


def with_form(num_examples: int, form: int) -> int:
    """Return what is sent of a lookup's number of examples and the number for its types."""
    return form * FORM + num_examples


def _size_range(smallest: int, largest: int) -> tuple[int, int]:
    if smallest < 0 or smallest // FORM != largest // FORM:
        return UNREADY, UNREADY
    return smallest % FORM, largest % FORM


class ControlMessage:
    """Collective. One message of all ranks in flight. All ranks send the same number of sizes."""

    def __init__(self, ranks: Ranks, status: BatchStatus) -> None:
        flags = (status.state, int(status.ready), int(status.ids_in_range), status.failure)
        # The reduction takes minima: a maximum is the negative of the minimum of negatives.
        compared = (status.weights, *status.sizes)
        values = (*flags, *compared, *[-value for value in compared])
        self._reduction: MinReduction | None
        # One exchange carries flags and numbers of ids: on sockets each collective costs a round
        # trip.
        if status.counts:
            # Transposed: each rank gets one number for each lookup. `read` transposes what has come
            # from the ranks.
            to_ranks = list(map(list, zip(*status.counts, strict=True)))
            self._reduction = ranks.start_min_and_exchange(values, to_ranks)
        else:
            self._reduction = ranks.start_all_reduce_min(*values)
        self._agreed = status

    def read(self) -> BatchStatus:
        """Return the status over all ranks; waits for them the first time."""
        if self._reduction is not None:
            state, ready, in_range, failure, *compared = self._reduction.wait()
            counts = tuple(zip(*self._reduction.received, strict=True))
            self._reduction = None
            half = len(compared) // 2
            weights, *smallest = compared[:half]
            max_weights, *largest = [-negated for negated in compared[half:]]
            self._agreed = BatchStatus(
                state=state,
                ready=bool(ready),
                ids_in_range=bool(in_range),
                size_ranges=tuple(map(_size_range, smallest, largest)),
                failure=failure,
                weights=weights,
                weights_are_alike=weights == max_weights,
                counts=counts,
            )
        return self._agreed

    def wait_up_to(self, seconds: float) -> bool:
        """Wait for the other ranks for at most `seconds`; return whether they have arrived."""
        return self._reduction is None or self._reduction.wait_up_to(seconds)

    def all_differ(self) -> bool:
        """Return whether a call differs on all ranks, and the same one. Waits for at most
        COMPARISON_SECONDS."""
        if not self.wait_up_to(COMPARISON_SECONDS):
            return False
        status = self.read()
        return status.weights < 0 and status.weights_are_alike


COMPARISON_SECONDS = 30.0
"""How long a rank whose call differs waits for the others, which may wait for it meanwhile."""
NOTICE_SECONDS = 30.0
"""How long a rank waits for the others to gather what differs; one may have failed in its step
after all."""


@dataclass(frozen=True)
class WeightedCall:
    """A call of the running step whose weights followed its ids. learns: whether these need a
    gradient."""

    path: str
    learns: bool


class LateComparison:
    """Compares inputs on a GPU with what was computed ahead; the host reads the result later. Not
    run on a GPU yet."""

    def __init__(self) -> None:
        self._differ: list[Tensor] = []
        self._sent: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is compared."""
        return not self._differ and self._sent is None

    def add(self, argument: Tensor, computed: Tensor) -> bool:
        """Compare two tensors of one shape on their device; they count as equal until the result is
        here."""
        if gpu.is_on_gpu(computed):  # it was computed on the stream of ids
            computed.record_stream(torch.cuda.current_stream(computed.device))
        # Reading the result would make the host wait for the GPU in the middle of the forward.
        self._differ.append((argument != computed).any())
        return True

    def end_step(self) -> None:
        """Send the step's result to the host, without waiting for it."""
        if not self._differ:
            return
        differ = torch.stack(self._differ).any()
        self._differ = []
        if not gpu.is_on_gpu(differ):
            self._sent = differ
            return
        # To pinned memory: a copy to other memory makes the host wait for the GPU.
        self._sent = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(
            differ, non_blocking=True
        )
        self._arrived = torch.cuda.current_stream(differ.device).record_event()

    def check(self, wait: bool = False) -> None:
        """Raise ProvenanceError where an input of an earlier step differs. wait: for what is not
        here yet."""
        if wait:
            self.end_step()
        if self._sent is None:
            return
        if self._arrived is not None:
            if not wait and not self._arrived.query():
                return
            self._arrived.synchronize()
        sent = self._sent
        self._sent = None
        self._arrived = None
        if bool(sent):
            raise ProvenanceError(
                "a table was called with another input than the step's operations computed ahead "
                "of it, in an earlier step, whose update is wrong: resume from a checkpoint before "
                "it. Set prefetch={'computed_ids': False} to look up what the step computes as it "
                "is called."
            )


class DifferingCalls:
    """The calls of one trainer that differ from what was prefetched, or between ranks: all ranks
    raise together.

    A rank that raised at once would not reach the lookups, or the user's own collectives, in which
    the others wait for it. The next lookup that is made as it is called carries the failure to all
    ranks, else the step's control message.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.late = LateComparison()
        """Inputs that the host has not compared."""
        self.failure: ProvenanceError | None = None
        """What this rank has found, for all ranks to raise."""
        self.is_reported = False
        """Whether the others know of it."""
        self._ranks = ranks

    def note(self, failure: ProvenanceError, make_rows: Callable[[], Any]) -> Any:
        """Note that a call differs, and return what it gets for rows. Of several, the first is
        raised."""
        self.failure = self.failure or failure
        try:
            return make_rows()
        except Exception as error:  # it cannot be called with this input in any case
            raise failure from error

    def agree_on_weights(self, calls: list[WeightedCall]) -> None:
        """Collective. Raise ShardingError where ranks differ in which weights need a gradient."""
        if calls:
            number = number_for([call.learns for call in calls])
            smallest, negated = self._ranks.start_all_reduce_min(number, -number).wait()
            if smallest != -negated:
                self.raise_unlike_weights(calls)

    def raise_unlike_weights(self, calls: list[WeightedCall]) -> None:
        """Collective. Raise ShardingError: ranks differ in which weights need a gradient."""
        gathered = self._ranks.all_gather([call.learns for call in calls])
        pairs = zip(calls, zip(*gathered, strict=True), strict=True)
        path, flags = next((call.path, flags) for call, flags in pairs if len(set(flags)) > 1)
        learning = [rank for rank, learns in enumerate(flags) if learns]
        raise ShardingError(
            f"'{path}' was called with ids whose weights need a gradient on ranks {learning} of "
            f"{len(flags)}, and on no others. Freeze feature processors, and layers that compute "
            "weights, on all ranks alike."
        )

    def check_late(self, wait: bool = False) -> None:
        """Note what the host has not compared until now. wait: for what is not here yet."""
        try:
            self.late.check(wait)
        except ProvenanceError as failure:
            self.failure = self.failure or failure

    def raise_in_lookup(self) -> None:
        """Raise this rank's failure, if any, in a lookup that is made as it is called; that carries
        it to all ranks."""
        if self.failure is not None:
            self.is_reported = True
            raise self.failure

    def raise_failure(self, rank: int) -> None:
        """Collective. Raise this rank's failure, or that of `rank`, as its control message has
        announced."""
        self.is_reported = True
        # A rank that failed in the meantime does not come: the others raise all the same, with less
        # to say.
        text = "a call differs from what was prefetched; that rank's own message says which"
        if self._ranks.start_all_reduce_min().wait_up_to(NOTICE_SECONDS):
            text = self._ranks.all_gather(None if self.failure is None else str(self.failure))[rank]
        raise self.failure or ProvenanceError(f"rank {rank}: {text}")
