"""Calls of sharded modules after a run: all ranks must make them, and one that is alone raises an
error."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from math import inf

import torch.distributed as dist

from lightning_distrec._compat.torch import default_store
from lightning_distrec.errors import RankError, ShardingError

FAREWELL = "farewell"
"""In the store: the number of ranks that have reached their end."""
DEPARTED = "departed/"
"""In the store, with its rank: that one asks it no more."""
NOTE_SECONDS = 10.0
"""After this long, a rank says what it waits for."""

_RUNS = "lightning_distrec/runs/"


def wait_for_all(place: str, limit_seconds: float, look: Callable[[float, int], object]) -> bool:
    """Return whether all ranks come to a place within a time: one may be gone, or wait for this one
    in a collective.

    By the process group's store, and not by a collective: ranks that have gone on to something else
    would match its messages with their own. look: called with the seconds waited and the number of
    ranks so far; ends the wait by what it raises.
    """
    store = default_store()
    num_ranks = dist.get_world_size()
    begin = time.monotonic()
    pause = 0.0002
    num_arrived = store.add(place, 1)
    while num_arrived < num_ranks:
        seconds = time.monotonic() - begin
        if seconds >= limit_seconds:
            break
        try:
            look(seconds, num_arrived)
        except RankError:
            # A rank that had come may have gone on, and failed in what comes next.
            if store.add(place, 0) < num_ranks:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        num_arrived = store.add(place, 0)
    return num_arrived >= num_ranks


def destroy_after_all(limit_seconds: float) -> None:
    """Destroy the process group once all ranks are here; rank 0, whose process holds the store,
    leaves last.

    Otherwise torch prints a stack trace for each rank that still asks, or waits for an answer: over
    NCCL a thread of its own does, until the group is destroyed. All at once, for which NCCL may
    wait.
    """
    store = default_store()
    rank = dist.get_rank()
    departed = [f"{DEPARTED}{other}" for other in range(1, dist.get_world_size())]
    with suppress(RuntimeError):  # rank 0 is gone
        wait_for_all(FAREWELL, limit_seconds, lambda *_: None)
    dist.destroy_process_group()
    with suppress(RuntimeError):
        if rank:
            store.set(departed[rank - 1], "")
        elif departed:
            store.wait(departed, timedelta(seconds=limit_seconds))


class CallsOutside:
    """Meets the other ranks before each call of a sharded module outside of runs; one for a
    process.

    All ranks have the same runs, in the same order.
    """

    def __init__(self) -> None:
        self._num_runs = self._num_calls = self._num_failures = 0
        self._timeout_seconds = 0.0

    def begin_run(self, timeout: timedelta) -> None:
        """Let ranks that are in a call after the run before know that this rank has begun
        another."""
        self._num_runs = self._num_runs + 1
        self._num_calls = 0
        self._num_failures = 0
        self._timeout_seconds = timeout.total_seconds()
        # Before the first run there is no group, nor a sharded module to call.
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            default_store().add(f"{_RUNS}{self._num_runs}", 1)

    def meet_after_failure(self, seconds: float) -> bool:
        """Return whether all ranks come here within some seconds, each after an exception in the
        run."""
        self._num_failures += 1
        try:
            return wait_for_all(
                f"{_RUNS}{self._num_runs}/failure {self._num_failures}", seconds, lambda *_: None
            )
        except RuntimeError:  # rank 0, whose process holds the store, is gone
            return False

    def meet(self, path: str) -> None:
        """Collective. Wait for all ranks to call what is sharded at `path`. Raises ShardingError:
        they do not."""
        num_ranks = dist.get_world_size()
        if num_ranks == 1:
            return
        self._num_calls += 1
        store = default_store()
        has_noted = False

        def look(seconds: float, num_arrived: int) -> None:
            nonlocal has_noted
            reason = self._obstacle(store, seconds)
            if reason:
                raise ShardingError(_refusal(path, num_arrived, num_ranks, reason))
            if seconds > NOTE_SECONDS and not has_noted:
                has_noted = True
                print(
                    f"Waiting for all ranks to call '{path}', which is sharded over them.",
                    file=sys.stderr,
                )

        wait_for_all(f"{_RUNS}{self._num_runs}/{self._num_calls}/{path}", inf, look)

    def _obstacle(self, store: dist.Store, seconds: float) -> str:
        if store.add(f"{_RUNS}{self._num_runs + 1}", 0):
            return "others have begun another run"
        if store.add(FAREWELL, 0):
            return "others have reached the end of their program"
        late = f"others did not within {seconds:.0f} s (timeout_seconds)"
        return late if seconds > self._timeout_seconds else ""


def _refusal(path: str, num_arrived: int, num_ranks: int, reason: str) -> str:
    return (
        f"'{path}' was called after the run on {num_arrived} of {num_ranks} ranks; {reason}. It is "
        "sharded, so every rank has a part of what the call needs. Call it on every rank, not "
        "under a condition such as trainer.is_global_zero; or call trainer.strategy.unshard() on "
        "every rank first, which makes the module an ordinary one."
    )
