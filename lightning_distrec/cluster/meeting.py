"""How the ranks of one job meet: rank 0 sends who connects its job's name and its store's port.

The network of ranks is trusted, as torch trusts it: see SECURITY.md. A rank that connects to
another job by mistake reads another name there, and goes on to the next port.
"""

import errno
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_distrec.cluster.host_resources import find_own_address, listen_at
from lightning_distrec.cluster.launched import MeetingPoint
from lightning_distrec.errors import RendezvousError
from lightning_distrec.units import shortened

TRY_SECONDS = 2.0
"""How long a rank waits for an answer at one port."""
LOG_AFTER_SECONDS = 30.0
"""What a rank waits for is logged after this time, and again each time that it has doubled."""
PAUSE_SECONDS = 0.02
PAUSE_SHARE = 0.1
MAX_PAUSE_SECONDS = 1.0
"""The first pause between two looks at the store; later ones are a share of the time waited."""
FAREWELL_SECONDS = 2.0
"""How long rank 0 stays after it has written why the ranks do not meet: late ones read it, too."""
MAX_ANSWER_BYTES = 1 << 12
LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::")
LATEST = "latest"
WATCH = "watch"
RANK = "rank"
ARRIVALS = "arrivals"
MISSING = "missing"
COMPLETE = "complete"
FAILED = "failed: "


Watch = Callable[[str, int], int]
"""Starts to watch over the ranks. Takes rank 0's host and the port at which its watch listens, 0 on
rank 0; returns that port."""


def meet(
    point: MeetingPoint,
    rank: int,
    num_ranks: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    nodes: Sequence[str] = (),
    watch: Watch = lambda host, port: port,
) -> Store:
    """Return a store that all ranks share, once all of them have arrived.

    log: called with what this rank waits for. nodes: of each rank by name, where that is known.
    watch: called once this rank and rank 0 know of each other, before the others have arrived.
    Raises RendezvousError: not all ranks arrived in time, their numbers differ, two processes are
    one rank, or no port is free.
    """
    waiting = _Waiting(timeout_seconds, log, point.find_loss)
    try:
        if rank == 0:
            return _gather(point, num_ranks, nodes, watch, waiting)
        return _arrive(point, rank, num_ranks, watch, waiting)
    except RendezvousError:
        raise
    except RuntimeError as error:  # what torch raises when the other side is gone
        raise RendezvousError(
            f"rank 0 at {point.host} ended before all ranks had arrived. Its own output says why."
        ) from error


class _Waiting:
    """Logs now and then what a rank waits for, and gives up in time."""

    def __init__(
        self, timeout_seconds: float, log: Callable[[str], None], find_loss: Callable[[], str]
    ) -> None:
        self._begin = time.monotonic()
        self._find_loss = find_loss
        self.timeout = timedelta(seconds=timeout_seconds)
        self._log = log
        self._log_at = LOG_AFTER_SECONDS

    def pause(self, describe: Callable[[], str], logs: bool = True) -> None:
        """Pause. describe: what the rank waits for. Raises RendezvousError: it waits no longer."""
        loss = self._find_loss()
        if loss:
            self._log(loss)  # Lightning's launcher may kill this process soon
            raise RendezvousError(loss)
        waited = time.monotonic() - self._begin
        limit = self.timeout.total_seconds()
        if waited > limit:
            limits = f"{limit:g} s (start_seconds, or timeout_seconds)"
            raise RendezvousError(f"{describe()}: not within {limits}.")
        if logs and waited > self._log_at:
            self._log(f"{describe()}, after {waited:.0f} s of {limit:g}.")
            self._log_at = 2 * waited
        pause = max(PAUSE_SECONDS, PAUSE_SHARE * waited)
        time.sleep(min(pause, MAX_PAUSE_SECONDS))


# -- rank 0


def _gather(
    point: MeetingPoint, num_ranks: int, nodes: Sequence[str], watch: Watch, waiting: _Waiting
) -> Store:
    """Wait for all ranks, and write into the store that all have arrived, or why not."""
    if point.is_hosted:
        # The launcher's store outlives attempts: it only says where rank 0 of the latest one is.
        launchers_store = _find_launchers_store(point, waiting)
        identity = f"{point.identity} {secrets.token_hex(8)}"
        host = find_own_address(point.host)
        listener = listen_at(host, 0, point.one_node)
    else:
        identity = point.identity
        host = point.host
        listener = _listen_at_free_port(point)
    store = _make_store(host, point.one_node, waiting.timeout)
    # Before any rank finds the store: one that has arrived is watched, however it ends.
    store.set(WATCH, str(watch(host, 0)))
    store.set(ARRIVALS, " ")
    missing = set(range(1, num_ranks))

    def describe_missing() -> str:
        num_arrived = num_ranks - len(missing)
        names = []
        for rank in sorted(missing):
            names.append(f"rank {rank} on {nodes[rank]}" if nodes else f"rank {rank}")
        hint = point.hint if num_arrived == 1 else ""
        arrived = f"{num_arrived} of {num_ranks} ranks arrived at {point.host}"
        report = f"{arrived}; waiting for {shortened(names, 8)}{hint}"
        store.set(MISSING, report)  # the other ranks report it at their own timeout
        return report

    with _answering(listener, {"job": identity, "port": store.port}):
        if point.is_hosted:
            _, port, *_ = listener.getsockname()
            launchers_store.set(LATEST, json.dumps([identity, host, port]))
        try:
            while missing:
                # One request for all ranks.
                for arrival in store.get(ARRIVALS).split():
                    rank, number = map(int, arrival.split(b"/"))
                    if number != num_ranks:
                        raise RendezvousError(
                            f"rank 0 expects {num_ranks} ranks, and rank {rank} expects {number}: "
                            "start all with one number."
                        )
                    missing.discard(rank)
                if missing:
                    waiting.pause(describe_missing)
        except RendezvousError as failure:
            store.set(COMPLETE, f"{FAILED}{failure}")
            time.sleep(FAREWELL_SECONDS)  # the store ends with this process
            raise
    store.set(COMPLETE, "")
    return store


def _make_store(host: str, one_node: bool, timeout: timedelta) -> TCPStore:
    # TCPStore would listen on all interfaces. Its port may be any: rank 0 passes it on.
    listener = listen_at(host, 0, one_node)
    address, port = listener.getsockname()[:2]
    return TCPStore(
        # The store's own client connects to this address, which must not be a wildcard.
        LOOPBACK if address in WILDCARDS else address,
        port,
        is_master=True,
        wait_for_workers=False,  # `_gather` waits, and names those that are missing
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes the descriptor itself
    )


def _listen_at_free_port(point: MeetingPoint) -> socket.socket:
    for port in point.ports:
        try:
            return listen_at(point.host, port, point.one_node)
        except OSError as error:
            # Another job on this node may have the port; other errors would come back at the next.
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(f"rank 0 cannot listen at port {port}: {error}.") from error
    ports = ", ".join(map(str, point.ports))
    raise RendezvousError(
        f"rank 0 cannot listen: none of the ports {ports} is free on {point.host}. Set MASTER_PORT "
        "to a free one, for all ranks."
    )


@contextmanager
def _answering(listener: socket.socket, answer: dict[str, object]) -> Iterator[None]:
    """Send an answer to whoever connects, within the context. The listener is closed at its end."""

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.sendall(json.dumps(answer).encode())

    thread = threading.Thread(target=serve, name="meeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread, as closing does not
        thread.join()
        listener.close()


# -- the other ranks


def _arrive(
    point: MeetingPoint, rank: int, num_ranks: int, watch: Watch, waiting: _Waiting
) -> Store:
    """Report to rank 0 that this rank has arrived, and wait for the others."""
    store, host = _find_store(point, waiting)
    num_processes = store.add(f"{RANK}/{rank}", 1)
    if num_processes > 1:
        raise RendezvousError(f"two processes are rank {rank} (RANK): start one of each.")
    watch(host, int(store.get(WATCH)))
    # Last: rank 0 reads one list, and not a key of each rank again and again.
    store.append(ARRIVALS, f"{rank}/{num_ranks} ")  # type: ignore[attr-defined]  # not in the stubs

    def describe_missing() -> str:
        is_reported = store.check([MISSING])
        return store.get(MISSING).decode() if is_reported else "waiting for the other ranks"

    while not store.check([COMPLETE]):
        waiting.pause(describe_missing, logs=False)  # rank 0 logs it for all
    outcome = store.get(COMPLETE).decode()
    if outcome.startswith(FAILED):
        raise RendezvousError(outcome.removeprefix(FAILED))
    return store


def _find_store(point: MeetingPoint, waiting: _Waiting) -> tuple[Store, str]:
    """Return rank 0's store once it is there, and rank 0's host."""
    _, *next_ports = point.ports
    ports_in_words = f" and {len(next_ports)} others" if next_ports else ""
    place = f"{point.host}, port {point.ports[0]}{ports_in_words}{point.hint}"
    places = [(point.identity, point.host, port) for port in point.ports]
    launchers_store = _find_launchers_store(point, waiting) if point.is_hosted else None
    while True:
        # Read again each time: rank 0 of a later attempt replaces it.
        if launchers_store is not None:
            places = []
            if launchers_store.check([LATEST]):
                places.append(json.loads(launchers_store.get(LATEST)))
        for identity, host, port in places:
            store_port = _ask_for_store(host, port, identity)
            if store_port is not None:
                store = TCPStore(host, store_port, is_master=False, timeout=waiting.timeout)
                return store, host
        waiting.pause(lambda: f"waiting for rank 0 at {place}")


def _ask_for_store(host: str, port: int, identity: str) -> int | None:
    """Return the port of rank 0's store; None where rank 0 of this job does not listen.

    By a plain socket: torch's client would wait without end for another program's listener.
    """
    try:
        with socket.create_connection((host, port), TRY_SECONDS) as connection:
            answer = json.loads(connection.recv(MAX_ANSWER_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(answer, dict) or answer.get("job") != identity:
        return None
    return int(answer["port"])


# -- the launcher's store


def _find_launchers_store(point: MeetingPoint, waiting: _Waiting) -> Store:
    address = point.host, point.ports[0]
    while True:
        # By a plain socket first: torch's client waits by itself, where nothing is logged.
        with suppress(OSError):
            socket.create_connection(address, TRY_SECONDS).close()
            client = TCPStore(*address, is_master=False, timeout=waiting.timeout)
            return PrefixStore(point.identity, client)
        waiting.pause(lambda: f"waiting for torchrun's store at {point.host}{point.hint}")
