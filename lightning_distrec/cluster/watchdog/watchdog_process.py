"""The process beside each rank: it sees its rank end or stop without asking it, and hears of the others from rank 0's.

A thread inside of a rank would stop with it, and wait for the interpreter while a long call into C holds that. Started
by its path, with the standard library alone, it is there within a tenth of a second.

Each tells rank 0's what it knows of its rank, whenever that changes and at every tick; rank 0's answers with its
verdict: who holds the others up, in words, or nobody. All of it is said anew each time, so a connection that was lost
is simply made again. A rank that still waits for a dead one after GRACE_SECONDS is killed, since nothing else ends a
call that waits for the network; one that an exception has told ends by itself.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TICK_SECONDS = 0.5
GRACE_SECONDS = 5.0
ANSWER_SECONDS = 2.0
"""So long it is looked for a reason, when a rank asks why an exchange has failed."""
LINGER_SECONDS = 10.0
"""So long rank 0's stays after its rank has ended, for the others to be told."""
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What a rank tells the process beside it."""

    rank: int
    pid: int
    nodes: list[str]
    """The name of the machine of each rank; empty where that is not known."""
    host: str
    port: int
    """Of rank 0's process; 0: this is rank 0's, which chooses one and prints it."""
    token: str
    limit_seconds: float
    """A rank that has been stopped for so long, or not heard of, holds the others up."""
    still_seconds: float
    """After so long in which no rank gets on, it is said where each of them is."""

    def name(self, rank: int) -> str:
        """Return a rank by number and machine."""
        return f"rank {rank} on {self.nodes[rank]}" if self.nodes else f"rank {rank}"


@dataclass(frozen=True)
class State:
    """What is known of a rank."""

    rank: int
    begun: int = 0
    """Runs (fit, validate ...) that it has begun."""
    ended: int = 0
    """The last run that it has come to the end of."""
    failed: int = 0
    """The last run that it has failed in."""
    failure: str = ""
    """Why; empty where it only repeats another's."""
    is_gone: bool = False
    is_closed: bool = False
    """It is not watched any more, and goes on."""
    is_stopped: bool = False
    ended_for: str = ""
    """The verdict for which the process beside it has ended it."""
    asked: int = 0
    """How often it has asked why an exchange has failed."""
    question: int = 0
    """The last question of where it is that it has answered."""
    place: str = ""
    progress: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the middle of a run, where it may wait for others."""
        return self.begun > max(self.ended, self.failed) and not (self.is_gone or self.is_closed)


@dataclass(frozen=True)
class Word:
    """What rank 0's process says to all."""

    verdict: str = ""
    """Who holds the others up, and why."""
    question: int = 0
    """How often all were asked where they are."""
    places: str = ""
    """Where they are."""


class Hub:
    """Rank 0's: hears of all ranks, and says who holds the others up."""

    def __init__(self, setting: Setting, say: Callable[[str], None]) -> None:
        self._setting = setting
        self._say = say
        self._states: dict[int, State] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._heard: dict[int, int] = {}
        self._asked = 0
        self._question = 0
        self._ticks = 0
        self._look_every = self._look_in = _ticks(setting.still_seconds)
        self._before: dict[int, State] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen, and return the port."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)
        self._server = await asyncio.start_server(self._hear, sock=listener, limit=LONGEST_LINE)
        return int(listener.getsockname()[1])

    @property
    def is_needed(self) -> bool:
        """Whether a rank may wait for another."""
        return any(state.is_waiting for state in self._states.values())

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        with contextlib.suppress(OSError, ValueError, TypeError, asyncio.CancelledError):
            if (await reader.readline()).decode().strip() == self._setting.token:
                async for line in reader:
                    state = State(**json.loads(line))
                    rank = state.rank
                    before, self._states[rank] = self._states.get(rank), state
                    self._writers[rank], self._heard[rank] = writer, self._ticks
                    if before is None or replace(before, place="", progress="", question=0) != replace(
                        state, place="", progress="", question=0
                    ):
                        self._tell()
        if self._writers.get(rank) is writer:
            del self._writers[rank]
        writer.close()

    def tick(self) -> None:
        """Look who is silent, and whether anybody gets on; tell all."""
        self._ticks += 1
        self._look_in -= 1
        if self._look_in == _ticks(ANSWER_SECONDS):
            self._before = dict(self._states)
            self._question += 1
        elif self._look_in <= 0:
            self._look()
        self._tell()

    def _look(self) -> None:
        """Say where all are, if nobody has got on since the last look, and they are not all at the same place."""
        waiting = {rank: state for rank, state in self._states.items() if state.is_waiting}
        past = [self._before.get(rank) for rank in waiting]
        is_still = all(
            then is not None and (then.begun, then.progress) == (now.begun, now.progress)
            for then, now in zip(past, waiting.values(), strict=True)
        )
        if is_still and len({state.place for state in waiting.values()}) > 1 and not self._verdict():
            self._say(f"No rank has got on for {self._look_every * TICK_SECONDS:.0f} s: {self._places()}.")
            self._look_every *= 2
        else:
            self._look_every = _ticks(self._setting.still_seconds)
        self._look_in = self._look_every

    def _tell(self) -> None:
        asked = sum(state.asked for state in self._states.values())
        if asked != self._asked:
            self._asked, self._question = asked, self._question + 1
        word = Word(self._verdict(), self._question, self._places() if asked else "")
        line = _line(word)
        for writer in self._writers.values():
            if not writer.is_closing():
                writer.write(line)

    def _verdict(self) -> str:
        waiting = [state for state in self._states.values() if state.is_waiting]
        return next(self._holding_up(waiting), "") if waiting else ""

    def _holding_up(self, waiting: list[State]) -> Iterator[str]:
        """Yield what holds up those who wait: what others were ended for, who cannot say so, who has failed."""
        limit = f"{self._setting.limit_seconds:g} s"
        states = [state for _, state in sorted(self._states.items()) if not state.is_closed]
        for state in states:
            if state.ended_for and any(other.begun == state.begun for other in waiting):
                yield state.ended_for
        for state in states:
            if not any(other.begun > max(state.ended, state.failed) for other in waiting if other is not state):
                continue
            name = self._setting.name(state.rank)
            if state.is_gone:
                yield f"{name} has ended in the middle of it all: its process is gone (killed, or out of memory?)"
            elif state.is_stopped:
                yield f"{name} has been stopped for {limit} (by SIGSTOP, or a scheduler)"
            elif (self._ticks - self._heard[state.rank]) * TICK_SECONDS > self._setting.limit_seconds:
                yield f"{name} has not been heard of for {limit}: its machine is gone, or the way to it"
        for state in states:
            if state.failure and any(other.begun == state.failed for other in waiting):
                yield f"{self._setting.name(state.rank)} failed: {state.failure}"

    def _places(self) -> str:
        """Return where the ranks are, those at the same place together."""
        at: dict[str, list[int]] = {}
        for rank, state in sorted(self._states.items()):
            if state.is_gone:
                place = "its process is gone"
            elif rank not in self._writers:
                place = "the connection to it is lost"
            elif state.ended == state.begun:
                place = "has ended its run"
            else:
                place = f"{state.progress}, {state.place}" if state.place else "does not answer"
                if state.failed == state.begun:
                    place = f"has failed at {place}"
            at.setdefault(place, []).append(rank)
        return "; ".join(f"{_ranks(self._setting, ranks)}: {place}" for place, ranks in at.items())


class Beside:
    """What each of these processes does for its own rank."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._hub = None if setting.port else Hub(setting, self._say)
        self._state = State(setting.rank)
        self._word = Word()
        self._writer: asyncio.StreamWriter | None = None
        self._input = b""
        self._since_word = self._stopped = self._held_up = self._asked_for = 0
        self._answered = self._passed_on = 0

    async def run(self) -> None:
        """Watch the rank until it ends."""
        port = self._setting.port
        if self._hub is not None:
            port = await self._hub.open()
            _write(port)
        os.set_blocking(0, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._read)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(self._setting.pid)
                loop.add_reader(pidfd, self._end, pidfd)
        talk = asyncio.create_task(self._talk("127.0.0.1" if self._hub else self._setting.host, port))
        while not (self._state.is_gone or self._state.is_closed):
            await asyncio.sleep(TICK_SECONDS)
            self._tick()
        lasts = _ticks(LINGER_SECONDS)
        while self._hub is not None and self._hub.is_needed and lasts > 0:
            await asyncio.sleep(TICK_SECONDS)
            self._hub.tick()
            lasts -= 1
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        talk.cancel()

    def _tick(self) -> None:
        self._since_word += 1
        if os.getppid() != self._setting.pid:
            self._end()
        self._stopped = self._stopped + 1 if _is_stopped(self._setting.pid) else 0
        self._change(is_stopped=self._stopped * TICK_SECONDS > self._setting.limit_seconds)
        self._send()
        if self._hub is not None:
            self._hub.tick()
        self._react()
        self._held_up = self._held_up + 1 if self._verdict and self._state.is_waiting else 0
        if self._held_up * TICK_SECONDS > GRACE_SECONDS:
            self._change(ended_for=self._verdict)
            self._say(f"{self._verdict}. This rank waits in vain and is ended.")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._setting.pid, signal.SIGKILL)

    @property
    def _verdict(self) -> str:
        if self._writer is not None and self._since_word * TICK_SECONDS > self._setting.limit_seconds:
            return f"{self._setting.name(0)} has not been heard of for {self._setting.limit_seconds:g} s"
        return self._word.verdict

    async def _talk(self, host: str, port: int) -> None:
        """Keep a connection to rank 0's process, and take what comes over it."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                reader, self._writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
                self._writer.write(f"{self._setting.token}\n".encode())
                self._send()
                async for line in reader:
                    self._word = Word(**json.loads(line))
                    self._since_word = 0
                    self._react()
            await asyncio.sleep(TICK_SECONDS)

    def _send(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_line(self._state))

    def _change(self, **changes: object) -> None:
        before, self._state = self._state, replace(self._state, **changes)  # type: ignore[arg-type]
        if self._state != before:
            self._send()

    def _end(self, pidfd: int | None = None) -> None:
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
        self._change(is_gone=True)

    def _read(self) -> None:
        """Take what the rank says: the fields of its state that have changed."""
        try:
            read = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not read:
            asyncio.get_running_loop().remove_reader(0)  # it is ending
            return
        *lines, self._input = (self._input + read).split(b"\n")
        for line in lines:
            self._change(**json.loads(line))
        if self._state.asked > self._asked_for:
            self._asked_for = self._state.asked
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._answer)
        self._react()

    def _react(self) -> None:
        """Pass on to the rank what it is asked, and what it has asked."""
        if self._word.question > self._passed_on:
            self._passed_on = self._word.question
            _write({"question": self._passed_on})
        if self._verdict and self._state.asked > self._answered:
            self._answer()

    def _answer(self) -> None:
        if self._state.asked > self._answered:
            self._answered = self._state.asked
            _write({"verdict": self._verdict, "places": self._word.places})

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"[rank: {self._setting.rank}] {what}\n".encode())


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / TICK_SECONDS))


def _line(what: State | Word) -> bytes:
    return json.dumps(asdict(what)).encode() + b"\n"


def _write(what: object) -> None:
    """Tell the rank; it may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(what).encode() + b"\n")


def _ranks(setting: Setting, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return setting.name(ranks[0])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)  # its rank's affair, with which it ends
    asyncio.run(Beside(Setting(**json.loads(sys.argv[1]))).run())
