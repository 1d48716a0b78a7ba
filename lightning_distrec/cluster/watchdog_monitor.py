"""The program that watches over one rank: it sees it die or stop, and learns of the others from
rank 0's process.

It is a process and not a thread, which would stop with its rank, and wait for the interpreter in a
long call into C. It uses the standard library only, since it starts without site-packages. Its
first line of input has the settings: a command line, with the token in it, could be read by every
user of the machine.

Each sends to rank 0's process what it knows of its rank, whenever that changes and at every tick;
that one, the hub, answers with its verdict: which rank the others wait for without end, and why.
Both are lines of JSON, and are sent in full each time, so that a lost connection is simply opened
again; both sides prove first that they have the token, and who is which rank. A rank that still
waits for a dead one after GRACE_SECONDS is killed, since nothing else ends a call that waits for
the network; a rank that got an exception ends by itself before that. It may hang on its way out,
since freeing a GPU's memory and leaving a process group wait for collectives of ranks that are
gone: a rank that is still leaving `silence_seconds` later is killed too.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lightning_distrec.cluster.door import (
    GREETING_SECONDS,
    encode_fields,
    is_signed,
    open_door,
    parse_fields,
    read_fields,
    sign,
)
from lightning_distrec.cluster.watchdog_messages import (
    RULE,
    HubMessage,
    RankState,
    Settings,
    encode_line,
    parse_state,
)

TICK_SECONDS = 0.5
"""How often each process sends its rank's state, and the hub its verdict."""
# Where a rank dies, the states of all change at once; a message to all for each would take the
# square of their number.
GATHERING_SECONDS = 0.05
"""How long the hub waits for further changes before it sends."""
ASK_SECONDS = 5.0
"""How often each process asks its rank whether it waits in an exchange."""
# From a verdict on, with which the rank's own wait of ANSWER_SECONDS in watchdog.py ends.
GRACE_SECONDS = 5.0
WRITING_SECONDS = 120.0
"""The same for a rank that writes a checkpoint, which would be lost with it."""
LINGER_SECONDS = 10.0
"""How long the hub stays after its rank has ended: the others learn from it alone that the rank is
gone."""
# asyncio's default of 64 KiB might not hold the locations of all ranks of a large job.
MAX_LINE_BYTES = 1 << 20
COMMAND = [
    # Without the user's paths and site-packages (-I, -S), and without what lightning_distrec
    # imports, to start fast.
    *(sys.executable, "-I", "-S", "-c"),
    "import sys, types; package = sys.modules['lightning_distrec'] = "
    "types.ModuleType('lightning_distrec'); "
    "package.__path__ = sys.argv[1:]; from lightning_distrec.cluster.watchdog_monitor import "
    "main; main()",
    str(Path(__file__).resolve().parents[1]),
]
"""Its input begins with the settings as a line of JSON."""


class Hub:
    """Receives the state of each rank, and sends its verdict to all, at every tick and soon after a
    state changes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._states: dict[int, RankState] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        # In ticks and not by the clock: a hub that was stopped itself must not take all others for
        # silent.
        self._ticks_silent = Counter[int]()
        self._is_sending_soon = False

    @property
    def is_needed(self) -> bool:
        """Whether a rank is running or leaving, and may wait for another."""
        return any(state.is_running or state.lingers for state in self._states.values())

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Return the rank whose process has connected; None if it does not prove that it is
        that."""
        token, nonce = self._settings.token.encode(), secrets.token_hex(16)
        writer.write(encode_fields({"nonce": nonce}))
        answer = await read_fields(reader)
        rank = answer.get("rank")
        if not is_signed(token, answer.get("proof"), "rank", rank, nonce, answer.get("nonce")):
            return None
        writer.write(encode_fields({"proof": sign(token, "hub", answer.get("nonce"))}))
        return int(str(rank))

    async def receive(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Receive what a rank's process sends, as long as it is connected. A rank is believed of
        itself alone."""
        self._writers[rank] = writer
        try:
            async for line in reader:
                state = parse_state(line)
                if state.rank != rank:
                    return
                earlier, self._states[rank] = self._states.get(rank), state
                self._ticks_silent[rank] = 0
                if state != earlier and not self._is_sending_soon:
                    self._is_sending_soon = True
                    asyncio.get_running_loop().call_later(GATHERING_SECONDS, self._send)
        finally:
            # A process that was started again may have connected before its old connection is seen
            # to end.
            if self._writers.get(rank) is writer:
                del self._writers[rank]

    def tick(self) -> None:
        """Count the silence of all, and send them the verdict."""
        self._ticks_silent.update(list(self._states))
        self._send()

    def _send(self) -> None:
        self._is_sending_soon = False
        states = self._states.values()
        message = HubMessage(
            next(self._verdicts([state for state in states if state.is_running]), ""),
            next(self._verdicts([state for state in states if state.lingers]), ""),
            self._list_locations() if any(state.is_asking for state in states) else "",
        )
        line = encode_line(message)
        for writer in self._writers.values():
            if not writer.is_closing():
                # No drain: one process that does not read must not delay the verdict for the
                # others.
                writer.write(line)

    def _verdicts(self, waiting: list[RankState]) -> Iterator[str]:
        """Yield which rank blocks those that may wait, and why; the cause before what followed from
        it.

        waiting: ranks that are running, or that are leaving: those wait for ranks that are gone,
        and not for such as have failed and are leaving too.
        """
        settings = self._settings
        states = [state for _, state in sorted(self._states.items()) if not state.is_closed]
        # First: a rank that its process has killed would look like one that died, and hide the
        # cause.
        for state in states:
            if state.killed_for and any(other.started == state.started for other in waiting):
                yield state.killed_for
        # Before failures, which follow from ranks that cannot report.
        for state in states:
            # A rank that has ended the run may go: only one that others still wait for in a run
            # blocks them.
            if not any(
                other.started > max(state.ended, state.failed)
                for other in waiting
                if other is not state
            ):
                continue
            if state.is_gone:
                yield (
                    f"{settings.name_ranks(state.rank)} has died: its process is gone (killed, "
                    "or out of memory?)"
                )
            elif state.is_stopped:
                name, limit = settings.name_ranks(state.rank), settings.silence_seconds
                yield f"{name} has been stopped for {limit:g} s (by SIGSTOP, or a scheduler)"
            elif self._ticks_silent[state.rank] * TICK_SECONDS > settings.silence_seconds:
                yield settings.describe_silence(state.rank)
        missed = [
            state
            for state in states
            if any(
                other.started == state.failed and (other.is_running or state.is_gone)
                for other in waiting
            )
        ]
        yield from (
            f"{settings.name_ranks(state.rank)} failed: {state.failure}"
            for state in missed
            if state.failure
        )
        for state in missed:
            if state.is_gone:
                yield (
                    f"{settings.name_ranks(state.rank)} has ended after a failed collective: "
                    "its own output says more"
                )
        # Not one that merely takes long: it computes, or waits for a disk, and the others wait for
        # it in one exchange.
        if (
            all(state.is_stuck for state in waiting)
            and len({state.progress for state in waiting}) > 1
        ):
            limit = settings.deadlock_seconds
            yield (
                f"ranks wait in different exchanges for {limit:g} s: {self._list_locations()}. "
                f"{RULE}"
            )

    def _list_locations(self) -> str:
        """Return where the ranks are, grouped by location."""
        ranks_at: dict[str, list[int]] = {}
        for rank, state in sorted(self._states.items()):
            if state.is_gone or rank not in self._writers:
                location = "its process is gone, or the connection to it"
            elif state.ended == state.started:
                location = "has ended its run"
            else:
                location = (
                    f"{state.progress}, {state.location}" if state.location else "does not answer"
                )
            ranks_at.setdefault(location, []).append(rank)
        return "; ".join(
            f"{self._settings.name_ranks(*ranks)}: {location}"
            for location, ranks in ranks_at.items()
        )


class Monitor:
    """Watches over one rank, whose stdin and stdout lead here: it sends its state, and receives
    what the hub sends.

    from_rank: the input after the settings.
    """

    def __init__(self, settings: Settings, from_rank: asyncio.StreamReader) -> None:
        self._settings, self._from_rank = settings, from_rank
        self._hub = Hub(settings)
        self._state = RankState(settings.rank)
        self._from_hub = HubMessage()
        self._writer: asyncio.StreamWriter | None = None
        self._ticks = Counter[str]()
        self._place, self._is_at_rest = 0, False

    async def run(self) -> None:
        """Watch until the rank ends."""
        if (descriptor := self._settings.listener) is not None:
            await open_door(socket.socket(fileno=descriptor), self._hub.greet, self._hub.receive)
        # asyncio holds tasks weakly.
        tasks = [
            asyncio.create_task(task)
            for task in (self._receive_from_rank(), self._receive_from_hub())
        ]
        while not self._state.is_over:
            await asyncio.sleep(TICK_SECONDS)
            self._tick()
        for _ in range(round(LINGER_SECONDS / TICK_SECONDS)):
            if self._hub.is_needed:
                await asyncio.sleep(TICK_SECONDS)
                self._hub.tick()
        if self._writer is not None:
            self._end_sending(self._writer)
        # A rank may be gone before its process has been connected, by which the hub learns of it.
        await asyncio.wait(tasks[1:], timeout=LINGER_SECONDS)
        for task in tasks:
            task.cancel()

    def _tick(self) -> None:
        limit = self._settings.silence_seconds
        # The parent's death makes this process somebody else's child.
        if os.getppid() != self._settings.pid:
            self._change(is_gone=True)
        # A debugger or a scheduler may stop a rank for a moment, which is no failure.
        self._change(is_stopped=self._has_lasted("stopped", is_stopped(self._settings.pid), limit))
        self._send()
        self._hub.tick()
        # A hub that was never connected cannot be missed; the rendezvous has its own timeout.
        is_silent = self._has_lasted("silent", self._writer is not None, limit)
        silence = self._settings.describe_silence(0) if is_silent else ""
        verdict, reason = (
            silence or self._from_hub.verdict,
            self._from_hub.verdict_for_leaving or silence,
        )
        is_asking = self._watch_exchange()
        if is_asking or self._state.is_asking or self._from_hub.locations:
            # the rank is gone, or in a long call and reads nothing
            with contextlib.suppress(OSError):
                os.write(1, encode_line(replace(self._from_hub, verdict=verdict)))
        grace = WRITING_SECONDS if self._state.is_writing else GRACE_SECONDS
        if self._has_lasted("blocked", bool(verdict) and self._state.is_running, grace):
            self._kill(verdict, "and this rank would wait forever")
        if self._has_lasted("leaving", bool(reason) and self._state.lingers, limit):
            self._kill(
                reason,
                "and this rank, whose run has failed, has not ended its teardown "
                f"within {limit:g} s",
            )

    def _watch_exchange(self) -> bool:
        """Note whether the rank has waited in one exchange for long, and return whether to ask it
        again."""
        limit, state = self._settings.deadlock_seconds, self._state
        self._ticks["asked"] += 1
        seconds = self._ticks["asked"] * TICK_SECONDS
        if is_due := limit > 0 and seconds >= min(ASK_SECONDS, limit / 4):
            self._is_at_rest = state.is_waiting and state.place == self._place
            self._place, self._ticks["asked"] = state.place, 0
            # Until it answers again: a rank that holds the interpreter does not, and may compute.
            self._state = replace(state, is_waiting=False)
        self._change(
            is_stuck=self._has_lasted("at rest", self._is_at_rest and state.is_running, limit)
        )
        return is_due and state.is_running

    def _has_lasted(self, condition: str, holds: bool, seconds: float) -> bool:
        """Whether a condition has held at every tick for longer than a time."""
        self._ticks[condition] = self._ticks[condition] + 1 if holds else 0
        return self._ticks[condition] * TICK_SECONDS > seconds

    def _kill(self, verdict: str, consequence: str) -> None:
        # Before the kill, which the hub would take for the cause.
        self._change(killed_for=verdict)
        with contextlib.suppress(OSError):
            line = (
                f"[rank: {self._settings.rank}] Terminating this rank: {verdict}, {consequence}.\n"
            )
            os.write(2, line.encode())
        with contextlib.suppress(ProcessLookupError):
            # No gentler signal: a handler of Python's would wait for the call that hangs.
            os.kill(self._settings.pid, signal.SIGKILL)

    async def _receive_from_hub(self) -> None:
        """Keep a connection to the hub, and receive its messages, until the hub has this rank's
        last state."""
        while True:
            try:
                address = self._settings.host, self._settings.port
                reader, writer = await asyncio.open_connection(*address, limit=MAX_LINE_BYTES)
                with contextlib.closing(writer):
                    await asyncio.wait_for(self._greet(reader, writer), GREETING_SECONDS)
                    self._writer = writer
                    # Another connection may mean another hub, which knows nothing of this rank.
                    self._send()
                    if self._state.is_over:
                        self._end_sending(writer)
                    async for line in reader:
                        self._from_hub = HubMessage(**parse_fields(line))
                        self._ticks["silent"] = 0
                    if self._state.is_over:
                        return
            except ConnectionRefusedError:
                if self._state.is_over:  # and so is the hub
                    return
            except (OSError, ValueError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(TICK_SECONDS)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Prove to the hub that this is the rank's process. Raises ValueError: it is no hub of this
        job."""
        token, rank, nonce = (
            self._settings.token.encode(),
            self._settings.rank,
            secrets.token_hex(16),
        )
        proof = sign(token, "rank", rank, (await read_fields(reader)).get("nonce"), nonce)
        writer.write(encode_fields({"rank": rank, "nonce": nonce, "proof": proof}))
        if not is_signed(token, (await read_fields(reader)).get("proof"), "hub", nonce):
            raise ValueError("no hub of this job")

    async def _receive_from_rank(self) -> None:
        """Receive the rank's state, as far as the rank knows it, until the rank ends."""
        async for line in self._from_rank:
            # a line that did not fit into the pipe; the next one has all
            with contextlib.suppress(ValueError):
                self._change(**json.loads(line))

    def _send(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_line(self._state))

    def _end_sending(self, writer: asyncio.StreamWriter) -> None:
        """Say that this rank's last state is sent; the hub closes the connection once it has read
        all.

        If this side closed it, the hub's next message would find it gone, and asyncio then drops
        what the hub has not read yet: that the rank has died.
        """
        with contextlib.suppress(OSError):
            if not writer.is_closing():
                writer.write_eof()

    def _change(self, **changes: object) -> None:
        earlier, self._state = self._state, replace(self._state, **changes)  # type: ignore[arg-type]
        if self._state != earlier:
            self._send()


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped. Source: man 5 proc."""
    with contextlib.suppress(OSError):
        # The program's name, in brackets, may hold blanks and brackets. A small t is a rank that a
        # debugger traces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1] == ["T"]
    return False


async def _watch() -> None:
    from_rank = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(from_rank)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    if line := await from_rank.readline():  # otherwise the rank has ended at once
        await Monitor(Settings(**json.loads(line)), from_rank).run()


def main() -> None:
    """Watch over the rank that has started this process."""
    for ignored in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGQUIT,
    ):
        # they are meant for the rank, with which this process ends
        signal.signal(ignored, signal.SIG_IGN)
    os.set_blocking(1, False)  # a rank that does not read must never stop the ticks
    asyncio.run(_watch())
