"""The rendezvous: the ranks of one job find each other, and no rank of another job.

All keys in the store have the job's identity as prefix, and a rank connects to a listener as rank 0 only if that sends
the same identity: another job at the same port, or an earlier attempt of this one, is skipped.
"""

import errno
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_distrec.errors import RendezvousError
from lightning_distrec.units import shortened

LOG_AFTER_SECONDS = 10.0
"""What a rank waits for is logged after this time, and again each time that it has doubled."""
TRY_SECONDS = 2.0
PAUSE_SECONDS = 0.1
MAX_IDENTITY_BYTES = 1000
ARRIVED, COMPLETE, MISSING, FAILED = "arrived", "complete", "missing", "failed"


@dataclass(frozen=True)
class MeetingPoint:
    """The address of the rendezvous."""

    host: str
    """Name or address of rank 0's node, as the others reach it."""
    ports: tuple[int, ...]
    """Ports to try, in this order; the same on all ranks."""
    identity: str
    """A text that no other job, step or attempt has."""
    is_hosted: bool = False
    """Whether the launcher listens there already, as torchrun's agent does; otherwise rank 0 does."""


def meet(
    point: MeetingPoint,
    rank: int,
    num_ranks: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    nodes: Sequence[str] = (),
) -> Store:
    """Return a store that all ranks share, once all of them have arrived.

    log: called with what this rank waits for. nodes: the node of each rank by name, where that is known.
    Raises RendezvousError: not all ranks arrived within `timeout_seconds`, or their numbers differ, or no port is free.
    """
    waiting = _Waiting(timeout_seconds, log)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if rank == 0 and not point.is_hosted:
            with _listen(point, timeout) as store:
                _arrive(store, point, rank, num_ranks, waiting, nodes)
        else:
            store = _find(point, waiting, timeout)
            _arrive(store, point, rank, num_ranks, waiting, nodes)
    except RuntimeError as error:  # what torch raises when the other side is gone
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"rank 0 at {point.host} ended before all ranks had arrived. Its own output says why."
        ) from error
    return store


def _arrive(
    store: Store, point: MeetingPoint, rank: int, num_ranks: int, waiting: "_Waiting", nodes: Sequence[str]
) -> None:
    store.set(f"{ARRIVED}/{rank}", str(num_ranks))
    if rank == 0:
        _gather(store, point, num_ranks, waiting, nodes)
    else:
        _wait_for_the_others(store, waiting)


class _Waiting:
    """Logs what a rank waits for now and then, and gives up at the timeout."""

    def __init__(self, timeout_seconds: float, log: Callable[[str], None]) -> None:
        self._begin = time.monotonic()
        self._timeout = timeout_seconds
        self._log = log
        self._log_at = LOG_AFTER_SECONDS

    def pause(self, what: Callable[[], str], logs: bool = True) -> None:
        """Pause. what: returns what the rank waits for. Raises RendezvousError: the timeout is over."""
        waited = time.monotonic() - self._begin
        if waited > self._timeout:
            raise RendezvousError(f"{what()}: not within timeout_seconds={self._timeout:g}.")
        if logs and waited > self._log_at:
            self._log(f"{what()}, after {waited:.0f} s of {self._timeout:g}.")
            self._log_at = 2 * waited
        time.sleep(PAUSE_SECONDS)


class _Introduction(socketserver.ThreadingTCPServer):
    """Sends to each client the identity of rank 0's job, and the port of its store, which the system has chosen.

    A plain socket, with a timeout for each wait: torch's TCPStore client waits without end for a listener that is not a
    store, another job's for example.
    """

    daemon_threads = True

    def __init__(self, port: int, identity: str, store_port: int) -> None:
        self.introduction = f"{identity}\n{store_port}\n".encode()
        super().__init__(("", port), _Introduce, bind_and_activate=False)
        self.socket.close()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)


class _Introduce(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Introduction)
        self.request.sendall(self.server.introduction)


@contextmanager
def _listen(point: MeetingPoint, timeout: timedelta) -> Iterator[Store]:
    """Yield rank 0's store, and answer to the other ranks meanwhile."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    introduction = _at_a_free_port(point, server.port)
    threading.Thread(target=introduction.serve_forever, args=(PAUSE_SECONDS,), daemon=True).start()
    try:
        yield PrefixStore(point.identity, server)
    finally:
        introduction.shutdown()
        introduction.server_close()


def _at_a_free_port(point: MeetingPoint, store_port: int) -> _Introduction:
    for port in point.ports:
        try:
            return _Introduction(port, point.identity, store_port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(f"rank 0 cannot listen at port {port}: {error}.") from error
    raise RendezvousError(
        f"rank 0 cannot listen: none of the ports {', '.join(map(str, point.ports))} is free on {point.host}. Set "
        "MASTER_PORT to a free one, for all ranks."
    )


def _find(point: MeetingPoint, waiting: _Waiting, timeout: timedelta) -> Store:
    """Return the store of rank 0, or of the launcher, once it is there."""
    while True:
        for port in point.ports:
            store_port = _reachable(point.host, port) if point.is_hosted else _introduced(point, port)
            if store_port is not None:
                client = TCPStore(point.host, store_port, is_master=False, timeout=timeout)
                return PrefixStore(point.identity, client)
        waiting.pause(lambda: f"waiting for rank 0 at {point.host}, port {_ports_in_words(point.ports)}")


def _reachable(host: str, port: int) -> int | None:
    with suppress(OSError), socket.create_connection((host, port), TRY_SECONDS):
        return port
    return None


def _introduced(point: MeetingPoint, port: int) -> int | None:
    """Return the port of the store that the listener at `port` sends, if it is this job's rank 0."""
    with suppress(OSError, ValueError), socket.create_connection((point.host, port), TRY_SECONDS) as connection:
        words = connection.makefile("rb")
        if words.readline(MAX_IDENTITY_BYTES).decode().rstrip("\n") == point.identity:
            return int(words.readline(MAX_IDENTITY_BYTES))
    return None


def _gather(store: Store, point: MeetingPoint, num_ranks: int, waiting: _Waiting, nodes: Sequence[str]) -> None:
    """Wait for all ranks, and write into the store that all have arrived, or why not."""
    missing = set(range(num_ranks))

    def what() -> str:
        arrived = f"{num_ranks - len(missing)} of {num_ranks} ranks arrived at {point.host}"
        report = f"{arrived}; missing: {_named(sorted(missing), nodes)}"
        store.set(MISSING, report)
        return report

    try:
        while missing:
            arrived = [rank for rank in missing if store.check([f"{ARRIVED}/{rank}"])]
            for rank in arrived:
                if (other := store.get(f"{ARRIVED}/{rank}").decode()) != str(num_ranks):
                    raise RendezvousError(
                        f"rank 0 expects {num_ranks} ranks, and rank {rank} expects {other}: start all with one number."
                    )
            missing -= set(arrived)
            if missing:
                waiting.pause(what)
    except RendezvousError as failure:
        store.set(FAILED, str(failure))
        time.sleep(5 * PAUSE_SECONDS)  # the store ends with this process: let the others read why
        raise
    store.set(COMPLETE, "")


def _wait_for_the_others(store: Store, waiting: _Waiting) -> None:
    def what() -> str:
        return store.get(MISSING).decode() if store.check([MISSING]) else "waiting for the other ranks"

    while not store.check([COMPLETE]):
        if store.check([FAILED]):
            raise RendezvousError(store.get(FAILED).decode())
        waiting.pause(what, logs=False)  # rank 0 logs it for all


def _ports_in_words(ports: tuple[int, ...]) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} and {len(ports) - 1} others"


def _named(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Return ranks by number and machine, the first few of them."""
    return shortened([f"rank {rank} on {nodes[rank]}" if nodes else f"rank {rank}" for rank in ranks], 8)
