"""Rank 0's process as the hub: it receives the states of all ranks, and decides which rank blocks the others."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

from .messages import (
    ANSWER_SECONDS,
    MAX_LINE_BYTES,
    TICK_SECONDS,
    HubMessage,
    RankState,
    Settings,
    as_line,
    num_ticks,
)


class Hub:
    """Receives the state of each rank, and sends its verdict to all, at every tick and whenever a state changes.

    log: called with lines for people.
    """

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        self._settings = settings
        self._log = log
        self._states: dict[int, RankState] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._received_at: dict[int, int] = {}
        self._questions = 0
        self._survey = 0
        self._ticks = 0
        self._check_every = self._check_in = num_ticks(settings.stall_seconds)
        self._before: dict[int, RankState] = {}
        self._server: asyncio.Server | None = None

    async def open(self, listener: socket.socket) -> None:
        """Receive the connections of the ranks' processes."""
        self._server = await asyncio.start_server(self._receive, sock=listener, limit=MAX_LINE_BYTES)

    @property
    def is_needed(self) -> bool:
        """Whether a rank is running or leaving, and may wait for another."""
        return any(state.is_running or state.lingers for state in self._states.values())

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        with contextlib.suppress(OSError, ValueError, TypeError, asyncio.CancelledError):
            if (await reader.readline()).decode().strip() == self._settings.token:
                async for line in reader:
                    state = RankState(**json.loads(line))
                    rank = state.rank
                    before, self._states[rank] = self._states.get(rank), state
                    self._writers[rank], self._received_at[rank] = writer, self._ticks
                    if before is None or _without_location(before) != _without_location(state):
                        self._send()
        if self._writers.get(rank) is writer:
            del self._writers[rank]
        writer.close()

    def tick(self) -> None:
        """Check for silent ranks and for a stall, and send the verdict to all."""
        self._ticks += 1
        self._check_in -= 1
        if self._check_in == num_ticks(ANSWER_SECONDS):
            self._before = dict(self._states)
            self._survey += 1
        elif self._check_in <= 0:
            self._check_progress()
        self._send()

    def _check_progress(self) -> None:
        """Log where all ranks are, if none has made progress since the last check and they are at different places."""
        running = {rank: state for rank, state in self._states.items() if state.is_running}
        before = [self._before.get(rank) for rank in running]
        is_stalled = all(
            then is not None and (then.started, then.progress) == (now.started, now.progress)
            for then, now in zip(before, running.values(), strict=True)
        )
        if is_stalled and len({state.location for state in running.values()}) > 1 and not self._verdict():
            seconds = self._check_every * TICK_SECONDS
            self._log(f"No rank has made progress for {seconds:.0f} s. Where they are: {self._locations()}.")
            self._check_every *= 2
        else:
            self._check_every = num_ticks(self._settings.stall_seconds)
        self._check_in = self._check_every

    def _send(self) -> None:
        questions = sum(state.questions for state in self._states.values())
        if questions != self._questions:
            self._questions, self._survey = questions, self._survey + 1
        for_leaving = next(self._verdicts([state for state in self._states.values() if state.lingers]), "")
        line = as_line(HubMessage(self._verdict(), for_leaving, self._survey, self._locations() if questions else ""))
        for writer in self._writers.values():
            if not writer.is_closing():
                writer.write(line)

    def _verdict(self) -> str:
        return next(self._verdicts([state for state in self._states.values() if state.is_running]), "")

    def _verdicts(self, waiting: list[RankState]) -> Iterator[str]:
        """Yield which rank blocks those that may wait, and why; the cause before what followed from it.

        waiting: ranks that are running, or that are leaving: those wait for ranks that are gone, and not for such as
        have failed and are leaving too.
        First what other processes have killed their ranks for, then ranks that cannot report, then those that failed.
        """
        silence = f"{self._settings.silence_seconds:g} s"
        states = [state for _, state in sorted(self._states.items()) if not state.is_closed]
        for state in states:
            if state.killed_for and any(other.started == state.started for other in waiting):
                yield state.killed_for
        for state in states:
            if not any(other.started > max(state.ended, state.failed) for other in waiting if other is not state):
                continue
            name = self._settings.name(state.rank)
            if state.is_gone:
                yield f"{name} has died: its process is gone (killed, or out of memory?)"
            elif state.is_stopped:
                yield f"{name} has been stopped for {silence} (by SIGSTOP, or a scheduler)"
            elif (self._ticks - self._received_at[state.rank]) * TICK_SECONDS > self._settings.silence_seconds:
                yield f"{name} has been silent for {silence}: its machine or the network to it is down"
        for state in states:
            held_up = [other for other in waiting if other.is_running or state.is_gone]
            if state.failure and any(other.started == state.failed for other in held_up):
                yield f"{self._settings.name(state.rank)} failed: {state.failure}"

    def _locations(self) -> str:
        """Return where the ranks are, grouped by location."""
        at: dict[str, list[int]] = {}
        for rank, state in sorted(self._states.items()):
            if state.is_gone:
                location = "its process is gone"
            elif rank not in self._writers:
                location = "the connection to it is lost"
            elif state.ended == state.started:
                location = "has ended its run"
            else:
                location = f"{state.progress}, {state.location}" if state.location else "does not answer"
                if state.failed == state.started:
                    location = f"has failed at {location}"
            at.setdefault(location, []).append(rank)
        return "; ".join(f"{self._settings.names(ranks)}: {location}" for location, ranks in at.items())


def _without_location(state: RankState) -> RankState:
    return replace(state, location="", progress="", survey=0)
