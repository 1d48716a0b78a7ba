"""What watchdog processes send to that of rank 0, and that one as the hub, which decides which rank blocks the others.

Standard library only: these processes start without site-packages.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

TICK_SECONDS = 0.5
"""How often each process sends its rank's state, and the hub its verdict."""
SURVEY_SECONDS = 2.0
"""How long ranks are asked for their locations before the hub compares these."""
# asyncio's default of 64 KiB might not hold the locations of all ranks of a large job.
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What a rank starts its process with."""

    rank: int
    pid: int
    nodes: list[str]
    """The node of each rank by name; empty where that is not known."""
    host: str
    port: int
    """Port of the hub."""
    listener: int | None
    """File descriptor at which the hub listens; None for the other ranks' processes."""
    token: str
    silence_seconds: float
    """A rank that is stopped or silent for this time is taken for lost."""
    stall_seconds: float
    """If no rank makes progress for this time, a line says where each of them is."""

    def name_ranks(self, *ranks: int) -> str:
        """Return one rank by number and node, several by their numbers."""
        if len(ranks) == 1:
            return f"rank {ranks[0]} on {self.nodes[ranks[0]]}" if self.nodes else f"rank {ranks[0]}"
        suffix = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"ranks {', '.join(map(str, ranks[:8]))}{suffix}"


@dataclass(frozen=True)
class RankState:
    """What a process knows of its rank, and sends to the hub."""

    rank: int
    started: int = 0
    """Number of runs (fit, validate ...) that the rank has started."""
    ended: int = 0
    """The last run that has ended."""
    failed: int = 0
    """The last run that has failed."""
    failure: str = ""
    """Why it failed; empty if only because of another rank."""
    is_gone: bool = False
    is_closed: bool = False
    """The rank is not watched any more, and goes on."""
    is_stopped: bool = False
    is_leaving: bool = False
    """The rank's run has failed, and it gives up its shards and process groups, which may wait for other ranks."""
    is_asking: bool = False
    """A collective of the rank has failed, and it waits for the reason."""
    killed_for: str = ""
    """The verdict for which the process has killed its rank."""
    location: str = field(default="", compare=False)
    """The line of code that it was at when the hub last asked, and how far its run was."""
    progress: str = field(default="", compare=False)

    @property
    def is_running(self) -> bool:
        """Whether the rank is in a run, where it may wait for others."""
        return self.started > max(self.ended, self.failed) and not (self.is_gone or self.is_closed)

    @property
    def lingers(self) -> bool:
        """Whether the rank is leaving, where it may wait for others too."""
        return self.is_leaving and not (self.is_gone or self.is_closed)


@dataclass(frozen=True)
class HubMessage:
    """What the hub sends to all."""

    verdict: str = ""
    """Which rank the others wait for in a collective that cannot complete, and why; empty if there is none."""
    verdict_for_leaving: str = ""
    """The same for ranks that are leaving: which rank is gone that they may wait for."""
    is_survey: bool = False
    """Whether ranks should send their locations."""
    locations: str = ""
    """Where the ranks are, if one of them is asking."""


def encode_line(message: RankState | HubMessage) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(asdict(message)).encode() + b"\n"


def num_ticks(seconds: float) -> int:
    """Return the number of ticks in a time, at least one."""
    return max(1, round(seconds / TICK_SECONDS))


class Hub:
    """Receives the state of each rank, and sends its verdict to all, at every tick and whenever a state changes.

    log: called with lines for people.
    """

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        self._settings, self._log = settings, log
        self._states: dict[int, RankState] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        # In ticks and not by the clock: a hub that was stopped itself must not take all others for silent.
        self._received_at: dict[int, int] = {}
        self._ticks = 0
        self._check_every = self._check_in = num_ticks(settings.stall_seconds)
        self._progress: set[tuple[int, int, str]] = set()
        """How far each rank was at the last check."""
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
            # The token is a signature by the job's key: a stranger can neither report states nor read locations.
            if (await reader.readline()).decode().strip() == self._settings.token:
                async for line in reader:
                    state = RankState(**json.loads(line))
                    rank = state.rank
                    earlier, self._states[rank] = self._states.get(rank), state
                    self._writers[rank], self._received_at[rank] = writer, self._ticks
                    # Not compared: locations and progress, which come at every survey and can wait for a tick.
                    if state != earlier:
                        self._send()
        # A process that was started again may have connected before its old connection is seen to end.
        if self._writers.get(rank) is writer:
            del self._writers[rank]
        writer.close()

    def tick(self) -> None:
        """Check for silent ranks and for a stall, and send the verdict to all."""
        self._ticks += 1
        self._check_in -= 1
        if self._check_in <= 0:
            self._check_progress()
        self._send()

    def _check_progress(self) -> None:
        """Log where all ranks are, if none has made progress since the last check and they are at different places."""
        running = [state for state in self._states.values() if state.is_running]
        progress = {(state.rank, state.started, state.progress) for state in running}
        # A subset: ranks that have ended their run since are no progress of those that wait for them.
        is_stalled, self._progress = progress <= self._progress, progress
        # Ranks that are all at one place do not block each other: they compute, or load data.
        if is_stalled and len({state.location for state in running}) > 1 and not self._find_verdict():
            seconds = self._check_every * TICK_SECONDS
            self._log(f"No rank has made progress for {seconds:.0f} s. Where they are: {self._list_locations()}.")
            # A stall that lasts must not fill the log.
            self._check_every *= 2
        else:
            self._check_every = num_ticks(self._settings.stall_seconds)
        self._check_in = self._check_every

    def _send(self) -> None:
        states = self._states.values()
        is_asked = any(state.is_asking for state in states)
        message = HubMessage(
            self._find_verdict(),
            next(self._verdicts([state for state in states if state.lingers]), ""),
            # Before each check the ranks have some ticks to answer.
            is_asked or self._check_in <= num_ticks(SURVEY_SECONDS),
            self._list_locations() if is_asked else "",
        )
        line = encode_line(message)
        for writer in self._writers.values():
            if not writer.is_closing():
                # No drain: one process that does not read must not delay the verdict for the others.
                writer.write(line)

    def _find_verdict(self) -> str:
        return next(self._verdicts([state for state in self._states.values() if state.is_running]), "")

    def _verdicts(self, waiting: list[RankState]) -> Iterator[str]:
        """Yield which rank blocks those that may wait, and why; the cause before what followed from it.

        waiting: ranks that are running, or that are leaving: those wait for ranks that are gone, and not for such as
        have failed and are leaving too.
        First what other processes have killed their ranks for, then ranks that cannot report, then those that failed.
        """
        silence = f"{self._settings.silence_seconds:g} s"
        states = [state for _, state in sorted(self._states.items()) if not state.is_closed]
        # First: a rank that its process has killed would look like one that died, and hide the cause.
        for state in states:
            if state.killed_for and any(other.started == state.started for other in waiting):
                yield state.killed_for
        for state in states:
            # A rank that has ended the run may go: only one that others still wait for in a run blocks them.
            if not any(other.started > max(state.ended, state.failed) for other in waiting if other is not state):
                continue
            name = self._settings.name_ranks(state.rank)
            if state.is_gone:
                yield f"{name} has died: its process is gone (killed, or out of memory?)"
            elif state.is_stopped:
                yield f"{name} has been stopped for {silence} (by SIGSTOP, or a scheduler)"
            elif (self._ticks - self._received_at[state.rank]) * TICK_SECONDS > self._settings.silence_seconds:
                yield f"{name} has been silent for {silence}: its machine or the network to it is down"
        for state in states:
            held_up = [other for other in waiting if other.is_running or state.is_gone]
            if state.failure and any(other.started == state.failed for other in held_up):
                yield f"{self._settings.name_ranks(state.rank)} failed: {state.failure}"

    def _list_locations(self) -> str:
        """Return where the ranks are, grouped by location."""
        ranks_at: dict[str, list[int]] = {}
        for rank, state in sorted(self._states.items()):
            if state.is_gone:
                location = "its process is gone"
            elif rank not in self._writers:
                location = "the connection to it is lost"
            elif state.ended == state.started:
                location = "has ended its run"
            else:
                location = f"{state.progress}, {state.location}" if state.location else "does not answer"
                location = f"has failed at {location}" if state.failed == state.started else location
            ranks_at.setdefault(location, []).append(rank)
        return "; ".join(f"{self._settings.name_ranks(*ranks)}: {location}" for location, ranks in ranks_at.items())
