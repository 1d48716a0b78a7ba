"""The program that watches over one rank: it sees it die or stop, and learns of the others from rank 0's process.

COMMAND runs it without lightning_distrec, the user's paths and site-packages (-I, -S), so that it starts fast. It is a
process and not a thread: a thread would stop with its rank, and would wait for the interpreter while a long call into C
holds that.

Each sends to rank 0's process what it knows of its rank, whenever that changes and at every tick; that one, the hub,
answers with its verdict: which rank the others wait for without end, and why. Both are lines of JSON, and are sent in
full each time, so that a lost connection is simply opened again. A rank that still waits for a dead one after
GRACE_SECONDS is killed, since nothing else ends a call that waits for the network; a rank that got an exception ends by
itself before that. It may hang on its way out, since freeing a GPU's memory and leaving a process group wait for
collectives of ranks that are gone: a rank that is still leaving `silence_seconds` after another is known to be gone is
killed too.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from .watchdog_hub import MAX_LINE_BYTES, TICK_SECONDS, Hub, HubMessage, RankState, Settings, encode_line, num_ticks

# Longer than ANSWER_SECONDS in watchdog.py, for which a rank holds an exception back while its run counts as running.
GRACE_SECONDS = 5.0
LINGER_SECONDS = 10.0
"""How long the hub stays after its rank has ended, so that the others get its verdict."""
COMMAND = [
    *(sys.executable, "-I", "-S", "-c"),
    "import sys; sys.path.append(sys.argv[1]); from cluster.watchdog_monitor import main; main(sys.argv[2])",
    # The package's own folder: `cluster` is imported from there, and lightning_distrec/__init__.py is not run.
    str(Path(__file__).resolve().parents[1]),
]
"""Followed by the settings as JSON."""


class Monitor:
    """Watches over one rank, whose stdin and stdout lead here: it sends its state, and receives answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hub = None if settings.listener is None else Hub(settings, self._log)
        self._state = RankState(settings.rank)
        self._from_hub = HubMessage()
        self._writer: asyncio.StreamWriter | None = None
        self._input = b""
        self._awaits_rank = False
        self._ticks_silent = self._ticks_stopped = self._ticks_blocked = self._ticks_leaving = 0

    async def run(self) -> None:
        """Watch until the rank ends."""
        if self._hub is not None:
            await self._hub.open(socket.socket(fileno=self._settings.listener))
        # A reader is called when there is something, of unknown length: reading must never stop the ticks.
        os.set_blocking(0, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._read)
        if hasattr(os, "pidfd_open"):
            # Where the kernel or a sandbox refuses it, `_tick` sees the rank's end, at most a tick later.
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(self._settings.pid)
                loop.add_reader(pidfd, self._rank_is_gone, pidfd)
        connection = asyncio.create_task(self._connect(self._settings.host, self._settings.port))
        while not (self._state.is_gone or self._state.is_closed):
            await asyncio.sleep(TICK_SECONDS)
            self._tick()
        # The hub outlives its rank for a while, as the others learn from it alone that the rank is gone.
        for _ in range(num_ticks(LINGER_SECONDS)):
            if self._hub is None or not self._hub.is_needed:
                break
            await asyncio.sleep(TICK_SECONDS)
            self._hub.tick()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        connection.cancel()

    def _tick(self) -> None:
        limit = self._settings.silence_seconds
        self._ticks_silent += 1
        # Where there is no pidfd: the parent's death makes this process somebody else's child.
        if os.getppid() != self._settings.pid:
            self._rank_is_gone()
        # A debugger or a scheduler may stop a rank for a moment, which is no failure.
        self._ticks_stopped = self._ticks_stopped + 1 if _is_stopped(self._settings.pid) else 0
        self._change(is_stopped=self._ticks_stopped * TICK_SECONDS > limit)
        self._send()
        if self._hub is not None:
            self._hub.tick()
        self._answer_rank()
        verdict, silence = self._find_verdict(), self._find_silence_of_hub()
        self._ticks_blocked = self._ticks_blocked + 1 if verdict and self._state.is_running else 0
        if self._ticks_blocked * TICK_SECONDS > GRACE_SECONDS:
            self._kill(verdict, "and this rank would wait forever")
        reason = self._from_hub.verdict_for_leaving or silence
        self._ticks_leaving = self._ticks_leaving + 1 if reason and self._state.lingers else 0
        if self._ticks_leaving * TICK_SECONDS > limit:
            self._kill(reason, f"and this rank, whose run has failed, has not ended its teardown within {limit:g} s")

    def _kill(self, verdict: str, consequence: str) -> None:
        # Before the kill, which the hub would take for the cause.
        self._change(killed_for=verdict)
        self._log(f"Terminating this rank: {verdict}, {consequence}.")
        with contextlib.suppress(ProcessLookupError):
            # No gentler signal: a handler of Python's would wait for the call that hangs.
            os.kill(self._settings.pid, signal.SIGKILL)

    def _find_verdict(self) -> str:
        return self._find_silence_of_hub() or self._from_hub.verdict

    def _find_silence_of_hub(self) -> str:
        silence = self._settings.silence_seconds
        # A hub that was never connected cannot be missed; the rendezvous has its own timeout.
        if self._writer is None or self._ticks_silent * TICK_SECONDS <= silence:
            return ""
        name = self._settings.name_ranks(0)
        return f"{name} has been silent for {silence:g} s: its machine or the network to it is down"

    async def _connect(self, host: str, port: int) -> None:
        """Keep a connection to the hub, and receive its messages."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                reader, self._writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
                self._writer.write(f"{self._settings.token}\n".encode())
                # Another connection may mean another hub, which knows nothing of this rank.
                self._send()
                async for line in reader:
                    self._from_hub = HubMessage(**json.loads(line))
                    self._ticks_silent = 0
                    self._answer_rank()
            await asyncio.sleep(TICK_SECONDS)

    def _send(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_line(self._state))

    def _change(self, **changes: object) -> None:
        earlier, self._state = self._state, replace(self._state, **changes)  # type: ignore[arg-type]
        if self._state != earlier:
            self._send()

    def _rank_is_gone(self, pidfd: int | None = None) -> None:
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
        self._change(is_gone=True)

    def _read(self) -> None:
        """Receive what the rank sends: its state, as far as the rank knows it."""
        try:
            received = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not received:
            asyncio.get_running_loop().remove_reader(0)  # the rank is ending
            return
        *lines, self._input = (self._input + received).split(b"\n")
        for line in lines:
            changes = json.loads(line)
            # For this process alone, and no field of the state.
            if changes.pop("is_answer"):
                self._awaits_rank = False
            self._change(**changes)
        if self._from_hub.is_survey:
            self._send()  # the location, which is no change

    def _answer_rank(self) -> None:
        """Send the rank the reason if it is asking, and get its location in a survey.

        One message at a time: a rank that is in a long call does not read, and writing to a full pipe would block.
        """
        if (self._state.is_asking or self._from_hub.is_survey) and not self._awaits_rank:
            self._awaits_rank = True
            message = {"verdict": self._find_verdict(), "locations": self._from_hub.locations}
            with contextlib.suppress(OSError):  # the rank may be gone
                os.write(1, json.dumps(message).encode() + b"\n")

    def _log(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"[rank: {self._settings.rank}] {line}\n".encode())


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        # The program's name, in brackets, may hold blanks and brackets. A small t is a rank that a debugger traces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def main(settings: str) -> None:
    """Watch over a rank. settings: as JSON."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)  # they are meant for the rank, with which this process ends
    asyncio.run(Monitor(Settings(**json.loads(settings))).run())
