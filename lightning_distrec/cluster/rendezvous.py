"""The rendezvous: the ranks of one job find each other, no rank of another job, and nobody else.

All keys in the store have the job's identity as prefix. Each rank proves to rank 0 that it has the
key of the job, and rank 0 proves it to each of them, by signing what the other side has just drawn:
see job_key.py. Another job at the same port, or an earlier attempt of this one, is skipped.
"""

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_distrec.cluster.door import MAX_LINE_BYTES, parse_fields
from lightning_distrec.cluster.introduction import (
    LOOPBACK,
    TRY_SECONDS,
    Introduction,
    agree_on_attempt,
    answer,
    find_introduction,
    listen_at,
    read_text,
)
from lightning_distrec.cluster.job_key import SET_IT, JobKey, choose_key, find_key
from lightning_distrec.errors import RendezvousError
from lightning_distrec.units import shortened

LOG_AFTER_SECONDS = 30.0
"""What a rank waits for is logged after this time, and again each time that it has doubled."""
PAUSE_SECONDS, PAUSE_SHARE, MAX_PAUSE_SECONDS = 0.02, 0.1, 1.0
"""The first pause between two looks at the store; later ones are a share of the time waited. So a
rank asks it a few times and then once a second, however many ranks wait for the last one."""
FAREWELL_PAUSES, FAREWELL_PAUSE_SECONDS = 20, 0.1
"""How often rank 0 pauses after it has written why the ranks do not meet: those that come now read
it, too."""
NAME = "lightning_distrec/job"
CHALLENGE, ARRIVED, ARRIVALS, COMPLETE, MISSING = (
    "challenge",
    "arrived",
    "arrivals",
    "complete",
    "missing",
)
FAILED = "failed: "


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
    """Whether the launcher listens there already, as torchrun's agent does; otherwise rank 0
    does."""
    one_node: bool = False
    """Whether all ranks are on one node: then rank 0 listens at `host` only, even where that is the
    loopback."""
    find_loss: Callable[[], str] = str
    """Returns which process of this job has ended, as far as this one sees: then there is nobody to
    wait for."""
    hint: str = ""
    """Why there may be nobody else, and what to do: part of the report where nobody else has
    arrived."""


Watch = Callable[[int, str], int]
"""Starts to watch over the ranks. Takes the port of rank 0's watch, 0 on rank 0, and a token that
is known to this job only; returns rank 0's port."""


def meet(
    point: MeetingPoint,
    rank: int,
    num_ranks: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    nodes: Sequence[str] = (),
    watch: Watch = lambda port, token: port,
) -> Store:
    """Return a store that all ranks share, once all of them have arrived.

    log: called with what this rank waits for. nodes: of each rank by name, where that is known.
    watch: called once this rank and rank 0 know of each other, before the others have arrived.
    Raises RendezvousError: not all ranks arrived in time, their numbers differ, one lacks the job's
    key, or no port is free.
    """
    meeting = _Meeting(
        point, rank, num_ranks, nodes, watch, _Waiting(timeout_seconds, log, point.find_loss)
    )
    try:
        return meeting.meet()
    except RuntimeError as error:  # what torch raises when the other side is gone
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"rank 0 at {point.host} ended before all ranks had arrived. Its own output says why."
        ) from error


def name_in_store(point: MeetingPoint, rank: int) -> str:
    """Return a name that a job without an id keeps over the restarts of its launcher's store; "" on
    other ranks than 0.

    torchrun on several nodes calls all jobs "none" that are started without --rdzv-id; its agent's
    store stays.
    """
    if rank:
        return ""
    store = PrefixStore(NAME, TCPStore(point.host, point.ports[0], is_master=False))
    # Where "" is expected, only an absent key is set: a restarted rank 0 gets the name that the
    # first one drew.
    name = store.compare_set(NAME, "", f"torchrun-{secrets.token_hex(8)}").decode(errors="replace")
    # It becomes a file's name, and whoever reaches torchrun's store may have written it.
    if not re.fullmatch(r"torchrun-[0-9a-f]{16}", name):
        raise RendezvousError(
            f"somebody else has written into torchrun's store at {point.host}. Start the job again."
        )
    return name


class _Waiting:
    """Logs what a rank waits for now and then, and gives up at the timeout, or where a process has
    ended."""

    def __init__(
        self, timeout_seconds: float, log: Callable[[str], None], find_loss: Callable[[], str]
    ) -> None:
        self._begin, self._find_loss = time.monotonic(), find_loss
        self.timeout = timedelta(seconds=timeout_seconds)
        self.log = log
        self._log_at = LOG_AFTER_SECONDS

    def pause(self, pending: str | Callable[[], str], logs: bool = True) -> None:
        """Pause. pending: what the rank waits for. Raises RendezvousError: it need not, or the
        timeout is over."""
        if loss := self._find_loss():
            self.log(loss)  # Lightning's launcher may kill this process soon
            raise RendezvousError(loss)
        waited, limit = time.monotonic() - self._begin, self.timeout.total_seconds()
        is_over = waited > limit
        if is_over or (logs and waited > self._log_at):
            text = pending if isinstance(pending, str) else pending()
            if is_over:
                raise RendezvousError(
                    f"{text}: not within {limit:g} s (start_seconds, or timeout_seconds)."
                )
            self.log(f"{text}, after {waited:.0f} s of {limit:g}.")
            self._log_at = 2 * waited
        time.sleep(min(max(PAUSE_SECONDS, PAUSE_SHARE * waited), MAX_PAUSE_SECONDS))


@dataclass
class _Meeting:
    """One rank's side of a rendezvous."""

    point: MeetingPoint
    rank: int
    num_ranks: int
    nodes: Sequence[str]
    watch: Watch
    waiting: _Waiting

    def meet(self) -> Store:
        """Return the store, once all ranks have arrived."""
        # torchrun's store outlives attempts, and still holds the keys of earlier ones.
        if self.point.is_hosted:
            identity = agree_on_attempt(
                self.point.identity,
                self.rank,
                lambda identity: self._find_store(replace(self.point, identity=identity)),
                lambda: self.waiting.pause(f"waiting for rank 0 in the store at {self.point.host}"),
            )
            self.point = replace(self.point, identity=identity)
        if self.rank:
            store = self._find_store(self.point)
            self._arrive(store)
            return store
        key = choose_key(os.environ)
        # The launcher's store, or one of its own while rank 0 answers to the other ranks.
        host = (
            nullcontext(self._find_store(self.point)) if self.point.is_hosted else self._listen(key)
        )
        with host as store:
            self._gather(store, key)
        return store

    @contextmanager
    def _listen(self, key: JobKey) -> Iterator[Store]:
        point, timeout = self.point, self.waiting.timeout
        # TCPStore would listen on all interfaces. Its port may be any: the introduction passes it
        # on.
        store_listener = listen_at(point.host, 0, point.one_node)
        host, store_port = store_listener.getsockname()[:2]
        server = TCPStore(
            # The store's own client connects to this address, which must not be a wildcard.
            LOOPBACK if host in ("0.0.0.0", "::") else host,
            store_port,
            is_master=True,
            wait_for_workers=False,  # the ranks that come are checked below, by their keys
            timeout=timeout,
            # Detached: the store closes the descriptor itself.
            master_listen_fd=store_listener.detach(),
        )
        with Introduction(
            _listen_at_free_port(point), point.identity, store_port, key, self.waiting.log
        ):
            yield PrefixStore(point.identity, server)

    def _find_store(self, point: MeetingPoint) -> Store:
        """Return the store of rank 0, or of the launcher, once it is there."""
        num_others = len(point.ports) - 1
        ports = f"{point.ports[0]} and {num_others} others" if num_others else str(point.ports[0])
        while True:
            for port in point.ports:
                if point.is_hosted:
                    # By a plain socket first: TCPStore's client waits by itself, where nothing is
                    # logged.
                    store_port = port if _is_reachable(point.host, port) else None
                else:
                    store_port = find_introduction(point.host, port, point.identity, os.environ)
                if store_port is not None:
                    client = TCPStore(
                        point.host, store_port, is_master=False, timeout=self.waiting.timeout
                    )
                    return PrefixStore(point.identity, client)
            self.waiting.pause(f"waiting for rank 0 at {point.host}, port {ports}{point.hint}")

    def _gather(self, store: Store, key: JobKey) -> None:
        """Wait for all ranks, and write into the store that all have arrived, or why not."""
        point, num_ranks = self.point, self.num_ranks
        nonce = secrets.token_hex(16)
        # Before the challenge: a rank that has read it is watched, however it ends.
        port = self.watch(0, key.sign("watch", point.identity, nonce))
        store.set(ARRIVALS, " ")
        store.set(CHALLENGE, json.dumps({"nonce": nonce, "offer": key.offer, "watch": port}))
        missing = set(range(1, num_ranks))

        def describe_missing() -> str:
            names = [
                f"rank {rank} on {self.nodes[rank]}" if self.nodes else f"rank {rank}"
                for rank in sorted(missing)
            ]
            hint = point.hint if len(missing) == num_ranks - 1 else ""
            arrived = f"{num_ranks - len(missing)} of {num_ranks} ranks arrived at {point.host}"
            report = f"{arrived}; waiting for {shortened(names, 8)}{hint}"
            # The other ranks report it at their own timeout.
            store.set(MISSING, report)
            return report

        try:
            while missing:
                if point.is_hosted:
                    answer(store, missing)
                # One request for all ranks; a check too, since get would block where a stranger has
                # named a rank.
                arrivals = set(store.get(ARRIVALS).split())
                new_ranks = [rank for rank in sorted(missing) if str(rank).encode() in arrivals]
                for rank in [rank for rank in new_ranks if store.check([f"{ARRIVED}/{rank}"])]:
                    rank_nonce = self._check_arrived(store, rank, key, nonce)
                    store.set(
                        f"{COMPLETE}/{rank}/proof",
                        key.sign("complete", point.identity, nonce, rank, rank_nonce),
                    )
                    missing.remove(rank)
                if missing:
                    self.waiting.pause(describe_missing)
        except RendezvousError as failure:
            store.set(COMPLETE, f"{FAILED}{failure}")
            for _ in range(FAREWELL_PAUSES):  # rank 0's own store ends with this process
                if point.is_hosted:
                    answer(store, range(1, num_ranks))
                time.sleep(FAREWELL_PAUSE_SECONDS)
            raise
        # After all proofs: a rank that sees it finds its own in the store.
        store.set(COMPLETE, "")

    def _check_arrived(self, store: Store, rank: int, key: JobKey, nonce: str) -> str:
        """Return what a rank that has arrived has drawn. Raises RendezvousError: it is not of this
        job."""
        fields = _read_fields(store, f"{ARRIVED}/{rank}")
        number, drawn = fields.get("num_ranks"), fields.get("nonce")
        # The signature before the number: without one, a stranger may have written it.
        if not key.is_signed(
            fields.get("proof"), "arrived", self.point.identity, nonce, rank, number, drawn
        ):
            raise RendezvousError(
                f"rank {rank} does not have the key of this job, which rank 0 has from "
                f"{key.origin}. {SET_IT}."
            )
        if number != self.num_ranks:
            raise RendezvousError(
                f"rank 0 expects {self.num_ranks} ranks, and rank {rank} expects {number}: start "
                "all with one number."
            )
        return str(drawn)

    def _arrive(self, store: Store) -> None:
        """Prove to rank 0 that this rank is of the job, and wait for the other ranks."""
        rank, identity = self.rank, self.point.identity
        while not store.check([CHALLENGE]):
            self.waiting.pause(f"waiting for rank 0 in the store at {self.point.host}")
        challenge, rank_nonce = _read_fields(store, CHALLENGE), secrets.token_hex(16)
        nonce, port = str(challenge.get("nonce")), challenge.get("watch")
        try:
            key = find_key(str(challenge.get("offer")), os.environ)
        except RendezvousError:
            _set_arrived(store, rank, {})  # without a proof: rank 0 names this rank to all
            raise
        proof = key.sign("arrived", identity, nonce, rank, self.num_ranks, rank_nonce)
        _set_arrived(
            store, rank, {"num_ranks": self.num_ranks, "nonce": rank_nonce, "proof": proof}
        )
        # Before the wait, so that a rank that dies in it is noticed.
        self.watch(
            port if isinstance(port, int) and 0 <= port < 1 << 16 else 0,
            key.sign("watch", identity, nonce),
        )

        def describe_missing() -> str:
            return (
                read_text(store, MISSING)
                if store.check([MISSING])
                else "waiting for the other ranks"
            )

        while not store.check([COMPLETE]):
            self.waiting.pause(describe_missing, logs=False)  # rank 0 logs it for all
        # One key for both outcomes, so that each look is one request.
        if (outcome := read_text(store, COMPLETE)).startswith(FAILED):
            raise RendezvousError(outcome.removeprefix(FAILED))
        # Only now: rank 0 has signed what this rank drew, so that it is no other process that
        # answered for it.
        proof = read_text(store, f"{COMPLETE}/{rank}/proof")
        if not key.is_signed(proof, "complete", identity, nonce, rank, rank_nonce):
            raise RendezvousError(
                f"whoever answers for rank 0 does not have the key of this job ({key.origin}): "
                f"{SET_IT}. Or two "
                f"processes are rank {rank} (RANK): start one of each."
            )


def _listen_at_free_port(point: MeetingPoint) -> socket.socket:
    for port in point.ports:
        try:
            return listen_at(point.host, port, point.one_node)
        except OSError as error:
            # Another job on this node may have the port; any other error would come back at the
            # next one.
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(f"rank 0 cannot listen at port {port}: {error}.") from error
    raise RendezvousError(
        f"rank 0 cannot listen: none of the ports {', '.join(map(str, point.ports))} is free on "
        f"{point.host}. Set "
        "MASTER_PORT to a free one, for all ranks."
    )


def _is_reachable(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), TRY_SECONDS):
        return True
    return False


def _set_arrived(store: Store, rank: int, fields: dict[str, Any]) -> None:
    """Show rank 0 that this rank has arrived."""
    store.set(f"{ARRIVED}/{rank}", json.dumps(fields))
    # Last: rank 0 reads the list of all ranks, and not a key of each again and again.
    store.append(ARRIVALS, f"{rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it


def _read_fields(store: Store, key: str) -> dict[str, Any]:
    """Return what a rank has written into the store; nothing, where it is not of ours."""
    with suppress(ValueError):
        return parse_fields(store.get(key)[:MAX_LINE_BYTES])
    return {}
