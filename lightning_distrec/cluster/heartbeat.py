"""How ranks notice that another one is gone: a thread in each has one connection to rank 0.

The kernel closes the connection of a rank that is killed, so that rank 0 knows of it at once; a
rank that is stopped, or whose machine or network is down, is silent. Each rank reports its state
whenever that changes, and once a second, less often where there are many; rank 0 answers with its
verdict: which rank the others wait for without end, and why. A rank whose call waits for the
network is ended `GRACE_SECONDS` after the verdict, since nothing else ends that call; one that got
an exception ends by itself before. It may hang on its way out, since freeing a GPU's memory and
leaving a process group wait for ranks that are gone: a rank that is still leaving `silence_seconds`
later is ended, too.

A call that holds the interpreter's lock keeps this thread from reporting, and counts as silence.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_distrec.cluster.places import (
    find_location,
    find_place,
    is_network_failure,
    is_waiting,
    locate_thread,
)
from lightning_distrec.cluster.reports import Hub, Link
from lightning_distrec.cluster.verdicts import RULE, Judge, RankState, Verdict
from lightning_distrec.errors import RankError, RendezvousError

TICK_SECONDS = 0.2
MAX_STEP_SECONDS = 1.0
BEAT_SECONDS = 1.0
"""How often a rank reports that it lives, once its last report was answered."""
BEATS_PER_SECOND = 32
"""What rank 0 receives of all ranks together: more of them report less often."""
LOOK_SECONDS = 5.0
"""How often a rank looks whether it waits in an exchange."""
MAX_TEXT = 500
ANSWER_SECONDS = 10.0
"""How long a rank waits for the reason of a failed collective. With 32 ranks on two cores it takes
more than 3 s to come."""
GRACE_SECONDS = 5.0
"""How long a rank that the verdict holds up may take to end by itself."""
WRITING_SECONDS = 120.0
"""The same for a rank that writes a checkpoint, which would be lost with it."""


class Heartbeat:
    """Watches over all ranks, from a thread; each rank has one. Ends this rank where it waits for
    another without end."""

    def __init__(self, rank: int, peer: Hub | Link) -> None:
        self._peer = peer
        self._silence_seconds = peer.judge.silence_seconds
        self._deadlock_seconds = peer.judge.deadlock_seconds
        max_seconds = max(BEAT_SECONDS, len(peer.judge.nodes) / BEATS_PER_SECOND)
        self._beat_seconds = min(max_seconds, self._silence_seconds / 4)
        self._state = RankState(rank, peer.job)
        self.is_writing = False
        """Whether a thread writes a checkpoint, which would be lost with this rank."""
        self._main = threading.main_thread().ident or 0
        self._progress: Callable[[], str] = str
        self._failure_location = ""
        self._place = 0
        self._next_look = 0.0
        self._next_beat = 0.0
        self._since: dict[str, float] = {}
        # Both the main thread and this one report.
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()

    def start_run(self, progress: Callable[[], str]) -> None:
        """Report that a run starts. progress: returns how far it is; called by another thread."""
        self._progress = progress
        self._failure_location = ""
        run = self._state.started + 1
        self.report(started=run, is_stuck=False)

    def end_run(self) -> None:
        """Report that the run has ended."""
        self.report(ended=self._state.started, is_asking=False)

    def begin_end(self) -> str:
        """Note that this rank waits for the others to end the run, too. Return where, which is the
        same on all."""
        self._progress = _wait_at_end
        return f"end of run {self._state.started}"

    def look_for_failures(self, waited_seconds: float, *_: float) -> None:
        """Raise RankError: a rank has failed, or is gone, or waits for this one.

        waited_seconds: since this rank came to the end of its run. At first the verdict may be that
        one was silent, which has gone on since, and taken the last steps with this one.
        """
        if waited_seconds > 2 * self._beat_seconds and self._peer.verdict.running:
            raise RankError(f"{self._peer.verdict.running}.")

    def ask(self) -> Verdict:
        """Return the verdict; after some seconds, one without a reason, but with all locations."""
        self.report(is_asking=True, location=self._failure_location)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._peer.verdict.running:
            if time.monotonic() > deadline:
                break
            time.sleep(TICK_SECONDS / 4)
        return self._peer.verdict

    def explain(self, failure: BaseException) -> RankError | None:
        """Report that the run has failed. Return why, if another rank is the cause; if not, the
        others are informed."""
        # The stack is unwound by now; the traceback still has the line that failed, but not the
        # frames around this one.
        frames = list(traceback.walk_tb(failure.__traceback__))
        frames.reverse()
        frames.extend(traceback.walk_stack(None))
        self._failure_location = find_location(frames)
        reason = None
        if is_network_failure(failure):
            verdict = self.ask()
            text, *_ = str(failure).strip().splitlines() or [""]
            unknown = (
                f"a collective failed ({text}). Where the ranks are: {verdict.locations}. {RULE}"
            )
            reason = f"{verdict.running}." if verdict.running else unknown
        # Rank 0 names a rank with a failure of its own as the cause; this one follows from another.
        is_repeated = reason is not None or isinstance(failure, RankError)
        text = "" if is_repeated else f"{type(failure).__name__}: {failure}"
        run = self._state.started
        self.report(failed=run, failure=text[:MAX_TEXT], is_asking=False)
        if self._state.rank == 0:
            # Others ask at this moment: an end of this process with their reports unread would take
            # the answer from them.
            time.sleep(TICK_SECONDS)
        return None if reason is None else RankError(reason)

    def report(self, **changes: Any) -> None:
        """Report changes of this rank's state.

        is_leaving: its run has failed, and it gives up what may wait for others. is_closed: it is
        not watched any more.
        """
        with self._lock:
            self._state = replace(self._state, **changes)
            self._peer.report(self._state)

    def _run(self) -> None:
        clock = 0.0
        last = time.monotonic()
        while not self._state.is_closed:
            self._peer.wait(TICK_SECONDS)
            # A rank that was stopped itself must not take the others for silent.
            elapsed = time.monotonic() - last
            clock += min(elapsed, MAX_STEP_SECONDS)
            last += elapsed
            with self._lock:
                self._peer.receive(clock)
            self._end_if_blocked(clock)
            if self._peer.is_answered and clock >= self._next_beat:
                self._next_beat = clock + self._beat_seconds
                self._beat(clock)
        self._peer.close()

    def _beat(self, clock: float) -> None:
        """Report that this rank lives, and where it is."""
        try:
            changes = self._look(clock)
        except Exception:  # of a trainer between two states, say: the rank lives all the same
            changes = {}
        self.report(**changes)

    def _look(self, clock: float) -> dict[str, Any]:
        """Return where this rank is, and whether it has waited in one exchange for long."""
        progress = self._progress()
        # After a failure the main thread is in handlers of the exception.
        location = self._failure_location or locate_thread(self._main)
        looked = {"progress": progress, "location": location}
        limit = self._deadlock_seconds
        if not limit or clock < self._next_look:
            return looked
        self._next_look = clock + min(LOOK_SECONDS, limit / 4)
        earlier = self._place
        self._place = self._find_place(progress)
        rests = self._place != 0 and self._place == earlier
        holds = rests and self._state.is_running
        is_stuck = self._lasts("at rest", holds, limit, clock)
        return looked | {"is_stuck": is_stuck}

    def _find_place(self, progress: str) -> int:
        """Return a number that stays while this rank waits in one exchange; 0 where it does not."""
        # Where a run ends, ranks ask the store again and again.
        if self._progress is _wait_at_end:
            return hash(progress)
        if not is_waiting(self._main):
            return 0
        return hash((progress, find_place(self._main)))

    def _end_if_blocked(self, clock: float) -> None:
        verdict = self._peer.verdict
        is_blocked = self._state.is_running and verdict.running != ""
        grace = WRITING_SECONDS if self.is_writing else GRACE_SECONDS
        if self._lasts("blocked", is_blocked, grace, clock):
            self._kill(verdict.running, "and this rank would wait forever")
        is_blocked = self._state.lingers and verdict.leaving != ""
        limit = self._silence_seconds
        if self._lasts("leaving", is_blocked, limit, clock):
            consequence = f"has not ended its teardown within {limit:g} s"
            self._kill(verdict.leaving, f"and this rank, whose run has failed, {consequence}")

    def _lasts(self, condition: str, holds: bool, seconds: float, clock: float) -> bool:
        """Whether a condition has held at every look for longer than a time."""
        if not holds:
            self._since.pop(condition, None)
            return False
        since = self._since.setdefault(condition, clock)
        return clock - since > seconds

    def _kill(self, verdict: str, consequence: str) -> None:
        rank = self._state.rank
        line = f"[rank: {rank}] Terminating this rank: {verdict}, {consequence}.\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        # No gentler signal: a handler of Python's would wait for the call that hangs.
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_at_end() -> str:
    return "at the end of its run"


def start_heartbeat(
    rank: int,
    judge: Judge,
    job: str,
    address: tuple[str, int],
    listener: socket.socket | None,
) -> Heartbeat:
    """Watch over all ranks. listener: where rank 0 listens, on rank 0.

    address: of that, on the others. job: a name, by which rank 0 refuses others that come by
    mistake. Raises RendezvousError: rank 0 cannot be reached.
    """
    if listener is not None:
        return Heartbeat(rank, Hub(judge, listener, job))
    try:
        return Heartbeat(rank, Link(judge, address, job))
    except OSError as error:
        host, port = address
        raise RendezvousError(
            f"rank {rank} cannot connect to {host}, port {port}, by which ranks notice that one is "
            f"gone: {error}. Let ranks connect, or set watchdog_seconds=0."
        ) from error
