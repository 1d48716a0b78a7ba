"""How ranks report to rank 0, and receive its verdict: lines of JSON, over one connection each."""

import contextlib
import json
import os
import select
import selectors
import socket
import time
import weakref
from dataclasses import asdict, replace
from typing import Any

from lightning_distrec.cluster.verdicts import Judge, RankState, Verdict

# Where a rank dies, the states of all change at once.
GATHERING_SECONDS = 0.05
"""How long rank 0 waits for further reports before it answers to all of them."""
CONNECT_SECONDS = 10.0
MAX_BYTES = 1 << 20
"""What a line may hold: the locations of all ranks of a large job."""

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_copies() -> None:
    for copy in list(_sockets):
        copy.close()


# Workers of dataloaders are forks, with copies of all sockets: a connection of which a worker has a
# copy would stay open when its rank is killed.
os.register_at_fork(after_in_child=_close_copies)


class Connection:
    """Sends and receives lines of JSON, and waits for neither."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _sockets.add(connection)
        self.socket = connection
        self._received = self._unsent = b""

    def send(self, message: RankState | Verdict) -> None:
        """Send a message, and what is left of earlier ones, if the other side is there."""
        self._unsent += json.dumps(asdict(message)).encode() + b"\n"
        with contextlib.suppress(OSError):
            num_sent = self.socket.send(self._unsent)
            self._unsent = self._unsent[num_sent:]

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come. Raises OSError: the other side is gone; ValueError:
        it is none of ours."""
        try:
            received = self.socket.recv(MAX_BYTES)
        except BlockingIOError:
            return []
        if not received:
            raise ConnectionResetError
        *lines, self._received = (self._received + received).split(b"\n")
        if len(self._received) > MAX_BYTES:
            raise ValueError("a line without an end")
        return list(map(json.loads, lines))


class Hub:
    """Rank 0's side: receives what the other ranks report, and sends them the verdict."""

    is_answered = True

    def __init__(self, judge: Judge, listener: socket.socket, job: str) -> None:
        self.judge, self.job = judge, job
        self.verdict = Verdict(RankState(0))
        self._states = {0: RankState(0)}
        self._connections: dict[int, Connection] = {}
        self._received_at: dict[int, float] = {}
        listener.setblocking(False)
        _sockets.add(listener)
        # By poll: an epoll would be shared with processes that are forked.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def report(self, state: RankState) -> None:
        """Take over rank 0's state, and send the verdict where that changes it."""
        self._states[0] = state
        self._decide(set())

    def wait(self, seconds: float) -> None:
        """Wait until a rank reports, for some seconds at most."""
        if self._selector.select(seconds):
            time.sleep(GATHERING_SECONDS)

    def receive(self, now: float) -> None:
        """Receive what has come, and answer. now: in seconds."""
        reported = set[int]()
        for key, _ in self._selector.select(0):
            if key.data is None:
                with contextlib.suppress(OSError):
                    accepted, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    connection = Connection(accepted)
                    self._selector.register(accepted, selectors.EVENT_READ, connection)
            else:
                reported |= self._receive_from(key.data, now)
        for rank, received_at in self._received_at.items():
            is_silent = now - received_at > self.judge.silence_seconds
            if is_silent != self._states[rank].is_silent:
                self._states[rank] = replace(self._states[rank], is_silent=is_silent)
        self._decide(reported)

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _receive_from(self, connection: Connection, now: float) -> set[int]:
        """Return which ranks have reported by a connection: one, or none."""
        reported = set[int]()
        try:
            for report in connection.receive():
                state = RankState(**report)
                if state.job != self.job:
                    raise ValueError("a rank of another job")
                reported.add(state.rank)
                self._states[state.rank], self._received_at[state.rank] = state, now
                self._connections[state.rank] = connection
        except (OSError, ValueError, TypeError):
            self._selector.unregister(connection.socket)
            connection.socket.close()
            reported = {r for r, other in self._connections.items() if other is connection}
            for rank in reported:
                del self._received_at[rank], self._connections[rank]
                self._states[rank] = replace(self._states[rank], is_gone=True)
            return set()
        return reported

    def _decide(self, reported: set[int]) -> None:
        """Send the verdict to all where it has changed, otherwise to those that have reported."""
        earlier, states = self.verdict, [state for _, state in sorted(self._states.items())]
        self.verdict = self.judge.judge(states, earlier)
        for rank in reported if self.verdict == earlier else self._connections:
            self._connections[rank].send(self.verdict)


class Link:
    """The side of another rank: reports to rank 0, and receives the verdict."""

    def __init__(self, judge: Judge, address: tuple[str, int], job: str) -> None:
        self.judge, self.job = judge, job
        self.verdict = Verdict(RankState(0))
        self.is_answered = True
        """Whether rank 0 has answered to the last report."""
        self._connection = Connection(socket.create_connection(address, CONNECT_SECONDS))
        self._poll = select.poll()
        self._poll.register(self._connection.socket, select.POLLIN)
        self._state: RankState | None = None
        self._received_at, self._is_lost = 0.0, False

    def report(self, state: RankState) -> None:
        """Send this rank's state."""
        self._state, self.is_answered = state, False
        self._connection.send(state)

    def wait(self, seconds: float) -> None:
        """Wait for a verdict, for some seconds at most."""
        if self._is_lost:
            time.sleep(seconds)
        else:
            self._poll.poll(1000 * seconds)

    def receive(self, now: float) -> None:
        """Receive the verdict; where rank 0 is gone or silent, that is one. now: in seconds."""
        try:
            messages = [] if self._is_lost else self._connection.receive()
        except (OSError, ValueError):
            self._is_lost, messages = True, []
        for message in messages:
            rank_0 = RankState(**message.pop("rank_0"))
            self.verdict = Verdict(rank_0, **message)
            self._received_at, self.is_answered = now, True
        is_silent = now - self._received_at > self.judge.silence_seconds
        if self._state is not None and (self._is_lost or is_silent):
            rank_0 = replace(self.verdict.rank_0, is_gone=self._is_lost, is_silent=is_silent)
            # What rank 0 has reported before comes first: it may be the reason why it is gone.
            self.verdict = self.judge.judge([rank_0, self._state], self.verdict)

    def close(self) -> None:
        """Close the connection."""
        self._connection.socket.close()
