"""What all ranks agree on.

Every rank calls the same method in the same order; in return no rank goes on alone. The messages travel over a gloo
group of their own, so that they neither queue behind gradients nor make a GPU wait.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_distrec import errors

T = TypeVar("T")


class Consensus:
    """The agreements of the ranks of one job. Collective: making one makes a process group.

    timeout_seconds: how long a rank waits for the others before the group gives up with an error.
    carried: what agreements carry; one for all.
    """

    def __init__(self, timeout_seconds: float, carried: "Carried") -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.carried = carried
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._ids: Any = None

    @property
    def group(self) -> Any:
        """The process group of the agreements; None for one rank."""
        return None if self.num_ranks == 1 else self._group

    def start_least(self, *values: int) -> "Agreement":
        """Collective. Begin to agree on the smallest of all ranks, for each of `values`; `Agreement` has them."""
        return Agreement(values, self.carried, None if self.num_ranks == 1 else self._group)

    def group_of_ids(self) -> Any:
        """Collective. Return a process group for ids that travel ahead; None where they share that of the tables.

        gloo runs groups side by side. NCCL's would wait for each other on the device in an order of its own.
        """
        if self._ids is None and self.num_ranks > 1 and dist.get_backend() == "gloo":
            self._ids = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._ids

    def say(self, *values: int) -> tuple[int, ...]:
        """Return these values, and what is carried, for a message that is not of this file's making."""
        return (*values, *self.carried.say())

    def hear(self, said: list[list[int]]) -> list[list[int]]:
        """Return the values of each rank, of what all ranks have said; what is carried is taken out."""
        self.carried.hear(*(min(flags) for flags in zip(*(of_rank[-NUM_CARRIED:] for of_rank in said), strict=True)))
        return [of_rank[:-NUM_CARRIED] for of_rank in said]

    def least(self, value: int) -> int:
        """Collective. Return the smallest `value` of all ranks."""
        return self.start_least(value).wait()[0]

    def everyone(self, value: Any) -> list[Any]:
        """Collective. Return every rank's `value`, in rank order."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_here(self, seconds: float) -> bool:
        """Whether all ranks call this within some time; the group is of no more use where they do not."""
        if self.num_ranks == 1:
            return True
        work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # what gloo raises when time is up, or when a rank is gone
            return False
        return True

    def all_or_none(self, what: str, action: Callable[[], T]) -> T:
        """Collective. Run `action` on every rank and return its result; when it fails on one rank, all raise.

        The rank that failed raises its own exception. The others raise the same exception of ours with the same
        message, or RankError where it was not one of ours. `action` itself must not leave a collective half way.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        reports = self.everyone(None if failure is None else (type(failure).__name__, str(failure)))
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                name, message = report
                kind = getattr(errors, name, None)
                if kind is None:
                    raise errors.RankError(f"rank {rank} failed in {what}: {name}: {message}")
                raise kind(f"rank {rank}: {message}")
        return result  # type: ignore[return-value]


NUM_CARRIED = 3
"""How many numbers each agreement carries besides its own."""
REQUEUE, STOP, GO_ON = range(3)
"""What a rank may be asked to do; of what several are asked, the least is what all do."""


class Carried:
    """What a rank tells the others with its next agreement, whatever that is about: that it was asked to stop, say."""

    def __init__(self) -> None:
        self.asked = GO_ON
        """What this rank was asked to do; the others may not know yet."""
        self.agreed = GO_ON
        """What all ranks know that one was asked to do."""
        self.num_agreements = 0
        """Agreements so far that have carried it."""
        self._has_failed: Callable[[], bool] | None = None
        self.has_failed = False
        """Whether all ranks know that what goes on behind the steps has failed on one."""
        self._look: Callable[[], bool] | None = None
        self.was_seen = False
        """Whether any rank has seen what it watches for."""
        self.num_unseen = 0
        """Agreements so far without that."""

    def ask(self, what: int) -> None:
        """This rank is asked to do STOP or REQUEUE. A signal's handler may call it, wherever the rank is."""
        self.asked = min(self.asked, what)

    def watch(self, look: Callable[[], bool] | None) -> None:
        """Let `look` say, whenever the ranks begin to agree on something, whether this rank sees something."""
        self._look = look

    def watch_failures(self, has_failed: Callable[[], bool] | None) -> None:
        """Let `has_failed` say, whenever the ranks begin to agree, whether something behind this rank's steps has."""
        self._has_failed = has_failed
        self.has_failed = False

    def forget(self) -> None:
        """Begin anew, with another run; one that was asked to stop too late to tell the others still is."""
        self.asked = self.asked if self.agreed == GO_ON else GO_ON
        self.agreed = GO_ON
        self.was_seen = False
        self.num_unseen = 0
        self._look = None

    def say(self) -> tuple[int, int, int]:
        """Return what this rank says now, as numbers of which the least counts."""
        self.num_agreements += 1
        failed = self._has_failed is not None and self._has_failed()
        return self.asked, int(self._look is None or not self._look()), int(not failed)

    def hear(self, stop: int, seen: int, failed: int) -> None:
        """All ranks together have said this."""
        self.agreed = min(self.agreed, stop)
        if not failed:
            self.has_failed = True
        if not seen:
            self.was_seen = True
        else:
            self.num_unseen += 1


class Agreement:
    """Numbers on their way to all ranks: the least of each."""

    def __init__(self, values: tuple[int, ...], carried: Carried, group: Any) -> None:
        self._carried = carried
        self._values = torch.tensor((*values, *carried.say()))
        self._agreed: list[int] | None = None
        self._work = None
        if group is not None:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MIN, group=group, async_op=True)

    def wait(self) -> list[int]:
        """Return the agreed numbers; may be called once or more."""
        if self._agreed is None:
            if self._work is not None:
                self._work.wait()
                self._work = None
            agreed = self._values.tolist()
            self._agreed = agreed[:-NUM_CARRIED]
            self._carried.hear(*agreed[-NUM_CARRIED:])
        return self._agreed

    def wait_at_most(self, seconds: float) -> None:
        """Wait for the other ranks for some time; whether they came is not told."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):  # what gloo raises when time is up, or when a rank is gone
                self._work.wait(timedelta(seconds=seconds))
            self._work = None


_current: tuple[Any, Consensus, Consensus] | None = None
_of_checkpoints: tuple[Any, Consensus] | None = None


def consensus_of_all_ranks(timeout_seconds: float) -> tuple[Consensus, Consensus]:
    """Collective. Return two consensuses of the default process group, made on the first call of each group.

    The second is for what is said once at every step. It has a group of its own, because a rank whose step fails says
    so there, while others may be agreeing on something inside of theirs: gloo aborts a process whose messages meet
    others of another size.
    """
    global _current
    world = dist.group.WORLD
    if _current is None or _current[0] is not world:
        carried = Carried()
        _current = (world, Consensus(timeout_seconds, carried), Consensus(timeout_seconds, carried))
    return _current[1:]


def consensus_of_checkpoints(timeout_seconds: float) -> Consensus:
    """Collective. Return one of the default process group for a thread that writes checkpoints behind the steps.

    It carries what `consensus_of_all_ranks` carries, and its own agreements carry nothing.
    """
    global _of_checkpoints
    world = dist.group.WORLD
    if _of_checkpoints is None or _of_checkpoints[0] is not world:
        carried = consensus_of_all_ranks(timeout_seconds)[0].carried
        _of_checkpoints = (world, Consensus(timeout_seconds, carried))
    return _of_checkpoints[1]


def forget_consensus() -> None:
    """Drop the consensus, before its process group is destroyed."""
    global _current, _of_checkpoints
    _current = _of_checkpoints = None
