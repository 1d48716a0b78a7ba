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
        self.rank: int | None = None
        """Whose state has come by it, on rank 0."""
        self._received = b""
        self._unsent = b""

    def send(self, message: RankState | Verdict) -> None:
        """Send a message, and what is left of earlier ones, if the other side is there."""
        line = json.dumps(asdict(message)) + "\n"
        self._unsent += line.encode()
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
        self._received += received
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > MAX_BYTES:
            raise ValueError("a line without an end")
        return list(map(json.loads, lines))


class Hub:
    """Rank 0's side: receives what the other ranks report, and sends them the verdict."""

    is_answered = True

    def __init__(self, judge: Judge, listener: socket.socket, job: str) -> None:
        self.judge = judge
        self.job = job
        self.verdict = Verdict(RankState(0))
        self._states = {0: RankState(0)}
        self._connections: dict[int, Connection] = {}
        self._received_at: dict[int, float] = {}
        self._listener = listener
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

    def receive(self, clock: float) -> None:
        """Receive what has come, and answer. clock: in seconds."""
        reported = set[int]()
        for key, _ in self._selector.select(0):
            if key.data is None:
                with contextlib.suppress(OSError):
                    accepted, _ = self._listener.accept()
                    connection = Connection(accepted)
                    self._selector.register(accepted, selectors.EVENT_READ, connection)
            else:
                reported |= self._receive_from(key.data, clock)
        for rank, received_at in self._received_at.items():
            silence = clock - received_at
            is_silent = silence > self.judge.silence_seconds
            if is_silent != self._states[rank].is_silent:
                self._change(rank, is_silent=is_silent)
        self._decide(reported)

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        for key in self._selector.get_map().values():
            if key.data is not None:
                key.data.socket.close()

    def _receive_from(self, connection: Connection, clock: float) -> set[int]:
        """Return which ranks have reported by a connection: one, or none."""
        reported = set[int]()
        try:
            for report in connection.receive():
                state = RankState(**report)
                if state.job != self.job:
                    raise ValueError("a rank of another job")
                rank = state.rank
                connection.rank = rank
                reported.add(rank)
                self._states[rank] = state
                self._received_at[rank] = clock
                self._connections[rank] = connection
        except (OSError, ValueError, TypeError):
            self._selector.unregister(connection.socket)
            connection.socket.close()
            if connection.rank is not None:
                self._received_at.pop(connection.rank, None)
                self._connections.pop(connection.rank, None)
                self._change(connection.rank, is_gone=True)
            return set()
        return reported

    def _change(self, rank: int, **changes: bool) -> None:
        state = self._states[rank]
        self._states[rank] = replace(state, **changes)  # type: ignore[arg-type]

    def _decide(self, reported: set[int]) -> None:
        """Send the verdict to all where it has changed, otherwise to those that have reported."""
        earlier = self.verdict
        ranks = sorted(self._states)
        states = [self._states[rank] for rank in ranks]
        self.verdict = self.judge.judge(states, earlier)
        has_changed = self.verdict != earlier
        for rank, connection in self._connections.items():
            if has_changed or rank in reported:
                connection.send(self.verdict)


class Link:
    """The side of another rank: reports to rank 0, and receives the verdict."""

    def __init__(self, judge: Judge, address: tuple[str, int], job: str) -> None:
        self.judge = judge
        self.job = job
        self.verdict = Verdict(RankState(0))
        self.is_answered = True
        """Whether rank 0 has answered to the last report."""
        connected = socket.create_connection(address, CONNECT_SECONDS)
        self._connection = Connection(connected)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._state: RankState | None = None
        self._received_at = 0.0
        self._is_lost = False

    def report(self, state: RankState) -> None:
        """Send this rank's state."""
        self._state = state
        self.is_answered = False
        self._connection.send(state)

    def wait(self, seconds: float) -> None:
        """Wait for a verdict, for some seconds at most."""
        if self._is_lost:
            time.sleep(seconds)
        else:
            milliseconds = 1000 * seconds
            self._poll.poll(milliseconds)

    def receive(self, clock: float) -> None:
        """Receive the verdict; where rank 0 is gone or silent, that is one. clock: in seconds."""
        messages = []
        if not self._is_lost:
            try:
                messages = self._connection.receive()
            except (OSError, ValueError):
                self._is_lost = True
        for message in messages:
            rank_0 = RankState(**message.pop("rank_0"))
            self.verdict = Verdict(rank_0, **message)
            self._received_at = clock
            self.is_answered = True
        silence = clock - self._received_at
        is_silent = silence > self.judge.silence_seconds
        is_held_up = self._is_lost or is_silent
        if is_held_up and self._state is not None:
            earlier = self.verdict
            rank_0 = replace(earlier.rank_0, is_gone=self._is_lost, is_silent=is_silent)
            # What rank 0 has reported before comes first: it may be the reason why it is gone.
            self.verdict = self.judge.judge([rank_0, self._state], earlier)

    def close(self) -> None:
        """Close the connection."""
        self._connection.socket.close()
