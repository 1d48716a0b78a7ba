"""The rendezvous: the ranks of one job find each other, no rank of another job, and nobody else.

All keys in the store have the job's identity as prefix. Each rank proves to rank 0 that it has the key of the job, and
rank 0 proves it to each of them, by signing what the other side has just drawn: see job_key.py. Another job at the same
port, or an earlier attempt of this one, is skipped.
"""

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_distrec.cluster.introduction import (
    LOOPBACK,
    TRY_SECONDS,
    answer,
    fields_of,
    find_introduction,
    identity_of_attempt,
    introduce,
    listen_at,
)
from lightning_distrec.cluster.job_key import SET_IT, JobKey, key_by_offer, key_of_rank_0
from lightning_distrec.errors import RendezvousError
from lightning_distrec.units import shortened

LOG_AFTER_SECONDS = 30.0
"""What a rank waits for is logged after this time, and again each time that it has doubled."""
PAUSE_SECONDS = 0.1
FAREWELL_PAUSES = 20
"""How often rank 0 pauses after it has written why the ranks do not meet: those that come now read it, too."""
NAME = "lightning_distrec/job"
CHALLENGE, ARRIVED, COMPLETE, MISSING, FAILED = "challenge", "arrived", "complete", "missing", "failed"


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
    one_node: bool = False
    """Whether all ranks are on one node: then rank 0 listens at `host` only, even where that is the loopback."""
    launcher_pid: int | None = None
    """The process that has started this one and is rank 0, if there is one: without it there is nobody to wait for."""
    hint: str = ""
    """Why there may be nobody else, and what to do: part of the report where nobody else has arrived."""


class Watch(Protocol):
    """Watches over the ranks from the moment that they know of each other."""

    def __call__(self, port: int, token: str) -> int:
        """Start watching. port: of rank 0's watch; 0 on rank 0. token: known to this job only. Return rank 0's port."""


def _no_watch(port: int, token: str) -> int:
    return port


def meet(
    point: MeetingPoint,
    rank: int,
    num_ranks: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    nodes: Sequence[str] = (),
    watch: Watch = _no_watch,
) -> Store:
    """Return a store that all ranks share, once all of them have arrived.

    log: called with what this rank waits for. nodes: the node of each rank by name, where that is known. watch: called
    once this rank and rank 0 know of each other, before the others have arrived.
    Raises RendezvousError: not all ranks arrived within `timeout_seconds`, their numbers differ, one does not have the
    key of the job, or no port is free.
    """
    waiting = _Waiting(timeout_seconds, log)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if point.is_hosted:
            what = f"waiting for rank 0 in the store at {point.host}"
            identity = identity_of_attempt(
                point.identity,
                rank,
                lambda identity: _find(replace(point, identity=identity), waiting, timeout),
                lambda: waiting.pause(lambda: what),
            )
            point = replace(point, identity=identity)
        if rank == 0:
            key = key_of_rank_0(os.environ)
            with _host(point, key, waiting, timeout) as store:
                _gather(store, point, num_ranks, waiting, nodes, key, watch)
        else:
            store = _find(point, waiting, timeout)
            _arrive(store, point, rank, num_ranks, waiting, watch)
    except RuntimeError as error:  # what torch raises when the other side is gone
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"rank 0 at {point.host} ended before all ranks had arrived. Its own output says why."
        ) from error
    return store


def name_in_store(point: MeetingPoint, rank: int) -> str:
    """Return a name that a job without an id keeps over the restarts of its launcher's store; "" on other ranks than 0.

    torchrun on several nodes calls all jobs "none" that are started without --rdzv-id; its agent's store stays.
    """
    if rank:
        return ""
    store = PrefixStore(NAME, TCPStore(point.host, point.ports[0], is_master=False))
    return store.compare_set(NAME, "", f"torchrun-{secrets.token_hex(8)}").decode()


class _Waiting:
    """Logs what a rank waits for now and then, and gives up at the timeout."""

    def __init__(self, timeout_seconds: float, log: Callable[[str], None]) -> None:
        self._begin = time.monotonic()
        self._timeout = timeout_seconds
        self.log = log
        self._log_at = LOG_AFTER_SECONDS

    def pause(self, what: Callable[[], str], logs: bool = True) -> None:
        """Pause. what: returns what the rank waits for. Raises RendezvousError: the timeout is over."""
        waited = time.monotonic() - self._begin
        if waited > self._timeout:
            raise RendezvousError(f"{what()}: not within timeout_seconds={self._timeout:g}.")
        if logs and waited > self._log_at:
            self.log(f"{what()}, after {waited:.0f} s of {self._timeout:g}.")
            self._log_at = 2 * waited
        time.sleep(PAUSE_SECONDS)


def _host(point: MeetingPoint, key: JobKey, waiting: _Waiting, timeout: timedelta) -> AbstractContextManager[Store]:
    """Yield rank 0's store: its own, while it answers to the other ranks, or the launcher's."""
    return nullcontext(_find(point, waiting, timeout)) if point.is_hosted else _listen(point, key, waiting, timeout)


@contextmanager
def _listen(point: MeetingPoint, key: JobKey, waiting: _Waiting, timeout: timedelta) -> Iterator[Store]:
    of_store = listen_at(point.host, 0, point.one_node)
    own_host, store_port = of_store.getsockname()[:2]
    server = TCPStore(
        LOOPBACK if own_host in ("0.0.0.0", "::") else own_host,
        store_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=of_store.detach(),
    )
    with introduce(_at_a_free_port(point), point.identity, store_port, key, waiting.log):
        yield PrefixStore(point.identity, server)


def _at_a_free_port(point: MeetingPoint) -> socket.socket:
    for port in point.ports:
        try:
            return listen_at(point.host, port, point.one_node)
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
            if point.is_hosted:
                store_port = _reachable(point.host, port)
            else:
                store_port = find_introduction(point.host, port, point.identity, os.environ)
            if store_port is not None:
                client = TCPStore(point.host, store_port, is_master=False, timeout=timeout)
                return PrefixStore(point.identity, client)
        if point.launcher_pid not in (None, os.getppid()):
            raise RendezvousError("the process that has started this rank (rank 0) is gone. Its own output says why.")
        waiting.pause(lambda: f"waiting for rank 0 at {point.host}, port {_ports_in_words(point.ports)}{point.hint}")


def _reachable(host: str, port: int) -> int | None:
    with suppress(OSError), socket.create_connection((host, port), TRY_SECONDS):
        return port
    return None


def _gather(
    store: Store,
    point: MeetingPoint,
    num_ranks: int,
    waiting: _Waiting,
    nodes: Sequence[str],
    key: JobKey,
    watch: Watch,
) -> None:
    """Wait for all ranks, and write into the store that all have arrived, or why not."""
    nonce = secrets.token_hex(16)
    port = watch(0, key.sign("watch", point.identity, nonce))
    store.set(CHALLENGE, json.dumps({"nonce": nonce, "offer": key.offer, "watch": port}))
    missing = set(range(1, num_ranks))

    def what() -> str:
        arrived = f"{num_ranks - len(missing)} of {num_ranks} ranks arrived at {point.host}"
        hint = point.hint if len(missing) == num_ranks - 1 else ""
        report = f"{arrived}; waiting for {_named(sorted(missing), nodes)}{hint}"
        store.set(MISSING, report)
        return report

    try:
        while missing:
            if point.is_hosted:
                answer(store, missing)
            arrived = [rank for rank in missing if store.check([f"{ARRIVED}/{rank}"])]
            for rank in arrived:
                theirs = _check_arrived(store, point, rank, num_ranks, key, nonce)
                store.set(f"{COMPLETE}/{rank}/proof", key.sign("complete", point.identity, nonce, rank, theirs))
            missing -= set(arrived)
            if missing:
                waiting.pause(what)
    except RendezvousError as failure:
        store.set(FAILED, str(failure))
        for _ in range(FAREWELL_PAUSES):  # rank 0's own store ends with this process
            if point.is_hosted:
                answer(store, range(1, num_ranks))
            time.sleep(PAUSE_SECONDS)
        raise
    store.set(COMPLETE, "")


def _check_arrived(store: Store, point: MeetingPoint, rank: int, num_ranks: int, key: JobKey, nonce: str) -> str:
    """Return what a rank that has arrived has drawn. Raises RendezvousError: it is not of this job."""
    theirs = _fields(store.get(f"{ARRIVED}/{rank}"))
    number, drawn = theirs.get("num_ranks"), theirs.get("nonce")
    if not key.is_signed(theirs.get("proof"), "arrived", point.identity, nonce, rank, number, drawn):
        raise RendezvousError(
            f"rank {rank} does not have the key of this job, which rank 0 has from {key.origin}. {SET_IT}."
        )
    if number != num_ranks:
        raise RendezvousError(
            f"rank 0 expects {num_ranks} ranks, and rank {rank} expects {number}: start all with one number."
        )
    return str(drawn)


def _arrive(store: Store, point: MeetingPoint, rank: int, num_ranks: int, waiting: _Waiting, watch: Watch) -> None:
    """Prove to rank 0 that this rank is of the job, and wait for the other ranks."""
    while not store.check([CHALLENGE]):
        waiting.pause(lambda: f"waiting for rank 0 in the store at {point.host}")
    challenge, own = _fields(store.get(CHALLENGE)), secrets.token_hex(16)
    nonce = str(challenge.get("nonce"))
    try:
        key = key_by_offer(str(challenge.get("offer")), os.environ)
    except RendezvousError:
        store.set(f"{ARRIVED}/{rank}", "{}")  # without a proof: rank 0 names this rank to all
        raise
    proof = key.sign("arrived", point.identity, nonce, rank, num_ranks, own)
    store.set(f"{ARRIVED}/{rank}", json.dumps({"num_ranks": num_ranks, "nonce": own, "proof": proof}))
    watch(int(challenge.get("watch", 0)), key.sign("watch", point.identity, nonce))
    _wait_for_the_others(store, waiting)
    if not key.is_signed(store.get(f"{COMPLETE}/{rank}/proof").decode(), "complete", point.identity, nonce, rank, own):
        raise RendezvousError(f"whoever answers for rank 0 does not have the key of this job ({key.origin}). {SET_IT}.")


def _wait_for_the_others(store: Store, waiting: _Waiting) -> None:
    def what() -> str:
        return store.get(MISSING).decode() if store.check([MISSING]) else "waiting for the other ranks"

    while not store.check([COMPLETE]):
        if store.check([FAILED]):
            raise RendezvousError(store.get(FAILED).decode())
        waiting.pause(what, logs=False)  # rank 0 logs it for all


def _fields(text: bytes) -> Mapping[str, Any]:
    """Return what a rank has written into the store; nothing, where it is not of ours."""
    with suppress(ValueError):
        return fields_of(text)
    return {}


def _ports_in_words(ports: tuple[int, ...]) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} and {len(ports) - 1} others"


def _named(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Return ranks by number and machine, the first few of them."""
    return shortened([f"rank {rank} on {nodes[rank]}" if nodes else f"rank {rank}" for rank in ranks], 8)
