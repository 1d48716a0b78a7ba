"""Collectives on Python values, and the decisions that all ranks take together.

Every rank calls the same method in the same order, so that no rank goes on alone. The messages
travel over gloo groups of their own, so that they neither queue behind gradients nor make a GPU
wait.
"""

import hashlib
import io
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from inspect import currentframe
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec import errors
from lightning_distrec._compat.gloo import one_socket_thread
from lightning_distrec.cluster.host_resources import IDS_GROUP_RANKS
from lightning_distrec.cluster.places import find_location

T = TypeVar("T")


class Consensus:
    """Collectives among the ranks of one job. Collective: making one makes a process group.

    flags: sent along with every min all-reduce; one object for all consensuses of a process.
    members: the ranks that take part, of which this is one; `rank` and `num_ranks` count these
    only. None: all.
    """

    def __init__(
        self, timeout_seconds: float, flags: "RankFlags", members: list[int] | None = None
    ) -> None:
        self.rank = dist.get_rank() if members is None else members.index(dist.get_rank())
        self.num_ranks = dist.get_world_size() if members is None else len(members)
        self.flags = flags
        self.timeout = timedelta(seconds=timeout_seconds)
        # Ranks outside of `members` do not come here; without local synchronization new_group would
        # wait for them.
        local = members is not None
        self._group = dist.new_group(members, self.timeout, "gloo", use_local_synchronization=local)
        self._ids: Any = None

    @property
    def group(self) -> Any:
        """The process group; None for one rank."""
        return None if self.num_ranks == 1 else self._group

    def start_all_reduce_min(self, *values: int) -> "PendingMin":
        """Collective. Start a min all-reduce of each of `values`, and of the flags; see
        `PendingMin.wait`."""
        return PendingMin(values, self.flags, self.group)

    def start_min_and_exchange(
        self,
        values: tuple[int, ...],
        to_ranks: list[list[int]],
        group: Any = None,
        device: Any = None,
    ) -> "PendingMin":
        """Collective. As `start_all_reduce_min`; each rank also gets its entry of `to_ranks`:
        `PendingMin.received`. group, device: of another exchange, which it joins."""
        return PendingMin(values, self.flags, group or self.group, to_ranks, device)

    def all_reduce_min(self, value: int) -> int:
        """Collective. Return the smallest `value` of all ranks."""
        return self.start_all_reduce_min(value).wait()[0]

    def ids_group(self) -> Any:
        """Collective. Return a process group for ids that are sent ahead; None where they share the
        tables' group.

        gloo runs groups side by side. NCCL's would wait for each other on the device in an order of
        its own. Many ranks would have a socket more to each other one.
        """
        # Backend and number are the same on all ranks, so that all make the group, or none does.
        is_made = self._ids is not None or not 1 < self.num_ranks <= IDS_GROUP_RANKS
        if not is_made and dist.get_backend() == "gloo":
            with one_socket_thread():
                self._ids = dist.new_group(backend="gloo", timeout=self.timeout)
        return self._ids

    def with_flags(self, *values: int) -> tuple[int, ...]:
        """Return `values` followed by this rank's flags, for a caller that sends them by an
        exchange of its own."""
        return (*values, *self.flags.to_send())

    def take_flags(self, gathered: list[list[int]]) -> list[list[int]]:
        """Return each rank's values without the flags that `with_flags` appended; the flags are
        taken over."""
        flags_of_ranks = [values[-NUM_FLAGS:] for values in gathered]
        self.flags.receive(*map(min, zip(*flags_of_ranks, strict=True)))
        return [values[:-NUM_FLAGS] for values in gathered]

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's `value`, in rank order; tensors come back in the host's
        memory, and without a graph.

        Raises RankError on every rank: one rank's value cannot be pickled, or ranks call it in
        different functions.
        """
        return [value] if self.num_ranks == 1 else all_gather_values(value, self._group)

    def all_or_none(self, activity: str, action: Callable[[], T]) -> T:
        """Collective. Run `action` on every rank and return its result; when it fails on one rank,
        all raise.

        The rank that failed raises its own exception, the others the same one with the same
        message, or RankError where it was not one of ours. `action` itself must not leave a
        collective half way.
        """
        result = None
        failure = None
        try:
            result = action()
        except Exception as error:
            failure = error
        # Also where nothing has failed: a rank does not know of the others.
        reports = self.all_gather(
            None if failure is None else (type(failure).__name__, str(failure))
        )
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                name, message = report
                kind = getattr(errors, name, None)
                if kind is not None:
                    raise kind(f"rank {rank}: {message}")
                raise errors.RankError(f"rank {rank} failed in {activity}: {name}: {message}")
        return result  # type: ignore[return-value]


FIRST_BYTES = 64
"""What one message holds; a rank whose value is larger makes all send a second one."""
LENGTH_BYTES = 5
CALLER_BYTES = 3
HEADER_BYTES = LENGTH_BYTES + CALLER_BYTES
RING_RANKS = 4
"""More of them send along a tree, in which a rank has fewer messages than there are ranks."""
TREE_BYTES = 1 << 20
"""What all ranks together may send so: the root of the tree sends all of it more than once."""
TAG = (1 << 20) - 1
"""Beyond the tags of people's own messages."""


class _Pickler(pickle.Pickler):
    """Sends tensors from the host's memory, and without a graph."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        # A copy: a view would be sent with all of what it is a view of.
        copy = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _to_bytes(value: Any) -> bytes:
    content = io.BytesIO()
    _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()


def all_gather_values(value: Any, group: Any = None) -> list[Any]:
    """Collective. Return every rank's `value`, in rank order. Raises as `Consensus.all_gather`.

    group: of gloo.
    """
    return _all_gather(value, group, _caller())


def _all_gather(value: Any, group: Any, caller: bytes) -> list[Any]:
    try:
        data = b"+" + _to_bytes(value)
    except Exception as error:  # of many kinds, also of the value's own
        reason = f"a value of type {type(value).__name__} cannot be sent to other ranks: {error}"
        data = b"-" + reason.encode()
    # Ranks do not know how long the others' values are. All send messages of one size first, and
    # rests where one needs that: the lengths that decide it are known to all by then.
    message = len(data).to_bytes(LENGTH_BYTES, "little") + caller + data
    num_ranks = dist.get_world_size(group)
    size = FIRST_BYTES
    messages = _all_gather_bytes(message[:size], size, num_ranks, group)
    if len({first[LENGTH_BYTES:HEADER_BYTES] for first in messages}) > 1:
        _raise_places(group)
    lengths = [HEADER_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little") for first in messages]
    if max(lengths) > size:
        ends = _all_gather_bytes(message[size:], max(lengths) - size, num_ranks, group)
        messages = [first + end for first, end in zip(messages, ends, strict=True)]
    contents = []
    for received, length in zip(messages, lengths, strict=True):
        contents.append(received[HEADER_BYTES:length])
    for rank, content in enumerate(contents):
        if not content.startswith(b"+"):
            raise errors.RankError(f"rank {rank}: {content[1:].decode(errors='replace')}")
    return [pickle.loads(content[1:]) for content in contents]


def _caller() -> bytes:
    """Return a number for the function that has called into this file."""
    frame = currentframe()
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    # By name: ranks that have different versions can compare them.
    name = "" if frame is None else f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    return hashlib.blake2b(name.encode(), digest_size=CALLER_BYTES).digest()


def _raise_places(group: Any) -> NoReturn:
    """Collective. Raise RankError with the place of each rank."""
    places = _all_gather(find_location(traceback.walk_stack(None)), group, bytes(CALLER_BYTES))
    lines = [f"rank {rank}: {place}\n" for rank, place in enumerate(places)]
    raise errors.RankError(
        f"ranks exchange messages in different places:\n{''.join(lines)}Probably one of them has "
        "caught an exception that all ranks raise, of a lookup or a collective, and has gone on. "
        "Do not catch it."
    )


def _all_gather_bytes(data: bytes, size: int, num_ranks: int, group: Any) -> list[bytes]:
    sent = torch.zeros(size, dtype=torch.uint8)
    received = torch.empty(num_ranks, size, dtype=torch.uint8)
    if data:
        # torch warns of read-only bytes, and frombuffer takes no empty buffer.
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if num_ranks <= RING_RANKS or received.numel() > TREE_BYTES:
        dist.all_gather_into_tensor(received.flatten(), sent, group=group)
    else:
        _gather_along_tree(received, sent, dist.group.WORLD if group is None else group)
    return [part.numpy().tobytes() for part in received]


def _gather_along_tree(received: Tensor, sent: Tensor, group: Any) -> None:
    """Collective. Fill `received`, (ranks, size), with what all ranks have sent.

    Along binomial trees to rank 0 and back: a rank exchanges with log2 of their number at most, and
    all ranks together send two messages for each. A ring of gloo's sends one for each pair.
    """
    rank = group.rank()
    received[rank] = sent
    distance = 1
    while rank % (2 * distance) == 0 and rank + distance < len(received):
        child = rank + distance
        # It has what the ranks from its own number on have sent.
        group.recv([received[child : child + distance]], child, TAG).wait()
        distance *= 2
    if rank:
        # Without the lowest bit a rank's number is its parent's.
        group.send([received[rank : rank + distance]], rank & (rank - 1), TAG).wait()
    dist.broadcast(received, group=group, group_src=0)


NUM_FLAGS = 5
"""How many numbers the flags add to a message."""
REQUEUE, STOP, CONTINUE = range(3)
"""What a signal requests of a rank. All ranks do the smallest of what was requested."""


class RankFlags:
    """What a rank reports to the others along with its next message, whatever that is about.

    A stop request or a failed write must reach all ranks at the same step, but is too rare for a
    message of its own at each step: a few numbers more in a message that is sent anyway cost
    nothing.
    """

    def __init__(self) -> None:
        # What a signal has requested of this rank, and what all ranks know to be requested of one.
        self.requested = self.agreed = CONTINUE
        self.num_exchanges = 0
        """Messages so far that were sent with flags."""
        self._has_failed: Callable[[], bool] | None = None
        self.has_failed = False
        """Whether all ranks know that background work has failed on one."""
        self._look: Callable[[], bool] | None = None
        self.was_seen = False
        """Whether any rank has seen what it watches for, and the number of messages so far without
        that."""
        self.num_unseen = 0
        self.compared = 0
        """A number that must be alike on all ranks, and whether all ranks know that it was not."""
        self.differs = False

    def request(self, request: int) -> None:
        """Request STOP or REQUEUE. A signal handler may call it, wherever the rank is."""
        self.requested = min(self.requested, request)

    def watch(self, look: Callable[[], bool] | None) -> None:
        """Call `look` for each message: whether this rank sees what it watches for."""
        self._look = look

    def watch_failures(self, has_failed: Callable[[], bool] | None) -> None:
        """Call `has_failed` for each message: whether work in the background of this rank's steps
        has failed."""
        self._has_failed = has_failed
        self.has_failed = False

    def reset(self) -> None:
        """Start another run. A stop request that came too late to reach the others stays
        requested."""
        self.requested = self.requested if self.agreed == CONTINUE else CONTINUE
        self.agreed = CONTINUE
        self.was_seen = False
        self.num_unseen = 0
        self._look = None
        self.compared = 0
        self.differs = False

    def to_send(self) -> tuple[int, int, int, int, int]:
        """Return this rank's flags now, as numbers of which the smallest counts."""
        self.num_exchanges += 1
        failed = self._has_failed is not None and self._has_failed()
        unseen = self._look is None or not self._look()
        return self.requested, int(unseen), int(not failed), self.compared, -self.compared

    def receive(
        self, requested: int, unseen: int, no_failure: int, compared: int, negated: int
    ) -> None:
        """Take over the flags of all ranks: the smallest of each."""
        self.agreed = min(self.agreed, requested)
        self.has_failed |= not no_failure
        self.was_seen |= not unseen
        self.num_unseen += bool(unseen)
        self.differs |= compared != -negated


class PendingMin:
    """A min all-reduce in flight; with `to_ranks` an all-to-all, of which the smallest values are
    taken here."""

    def __init__(
        self,
        values: tuple[int, ...],
        flags: RankFlags,
        group: Any,
        to_ranks: list[list[int]] | None = None,
        device: Any = None,
    ) -> None:
        self._flags = flags
        flagged = (*values, *flags.to_send())
        self._num_values = len(flagged)
        self._result: list[int] | None = None
        self.received: list[list[int]] = to_ranks or []
        """What each rank has sent to this one by `to_ranks`, after `wait`."""
        # Values, flags and what single ranks get travel as one message: each one costs the
        # network's latency.
        rows = [(*flagged, *numbers) for numbers in to_ranks or ((),)]
        self._values = sent = torch.tensor(rows, device=device)
        self._work = None
        if group is not None and to_ranks is None:
            self._work = dist.all_reduce(sent, dist.ReduceOp.MIN, group=group, async_op=True)
        elif group is not None:
            # Row i goes to rank i. Its first columns are alike in all rows: `wait` takes their
            # minimum.
            self._values = torch.empty_like(sent)
            self._work = dist.all_to_all_single(self._values, sent, group=group, async_op=True)

    def wait(self) -> list[int]:
        """Return the smallest of each number; may be called more than once."""
        if self._result is None:
            if self._work is not None:
                self._work.wait()
                self._work = None
            per_rank = self._values.tolist()
            smallest = list(map(min, *per_rank)) if len(per_rank) > 1 else per_rank[0]
            if self.received:
                self.received = [numbers[self._num_values :] for numbers in per_rank]
                smallest = smallest[: self._num_values]
            self._result = smallest[:-NUM_FLAGS]
            # Once for each message: `num_unseen` counts them.
            self._flags.receive(*smallest[-NUM_FLAGS:])
        return self._result

    def wait_up_to(self, seconds: float) -> bool:
        """Wait for the other ranks for at most `seconds`; return whether they have arrived. `wait`
        may follow."""
        if self._work is not None:
            try:
                self._work.wait(timedelta(seconds=seconds))
            except RuntimeError:  # what gloo raises when time is up, or when a rank is gone
                return False
        return True


@dataclass(frozen=True)
class JobConsensus:
    """The consensuses of one default process group. They share their flags; each has a process
    group of its own."""

    world: Any
    general: Consensus
    """For everything that is agreed on now and then, and for checkpoints that the main thread
    writes."""
    steps: Consensus
    """For the one message of every step. A rank whose step fails reports that here while others may
    be in the middle of a collective of `general`: gloo aborts a process whose messages meet others
    of another size."""

    @cached_property
    def writing_thread(self) -> Consensus:
        """Collective, the first time. For the thread that writes checkpoints: no two threads may
        use a group at once.

        It sends no flags. Made where checkpoints are written so: each group of gloo's has three
        threads, and connects.
        """
        return Consensus(self.general.timeout.total_seconds(), self.general.flags)


_latest: JobConsensus | None = None


def job_consensus(timeout_seconds: float) -> JobConsensus:
    """Collective. Return the consensuses of the default process group, made on the first call for
    each group."""
    global _latest
    world = dist.group.WORLD
    # Groups are made in the same order on all ranks, as torch names them by counting. A later
    # process group, after the first was destroyed, gets its own.
    if _latest is None or _latest.world is not world:
        flags = RankFlags()
        general = Consensus(timeout_seconds, flags)
        with one_socket_thread():
            _latest = JobConsensus(world, general, steps=Consensus(timeout_seconds, flags))
    return _latest


def forget_consensus() -> None:
    """Drop the consensuses, before their process group is destroyed."""
    global _latest
    _latest = None
