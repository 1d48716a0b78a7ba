"""The sockets by which a rank finds rank 0's store: rank 0 sends its port to those who have the key
of the job.

Plain sockets, with a timeout for each wait: torch's TCPStore client waits without end for a
listener that is not a store, another job's for example.
"""

import asyncio
import errno
import hashlib
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from lightning_distrec.cluster.door import (
    BACKLOG,
    MAX_LINE_BYTES,
    encode_fields,
    open_door,
    parse_fields,
)
from lightning_distrec.cluster.job_key import SET_IT, JobKey, find_key
from lightning_distrec.errors import RendezvousError

TRY_SECONDS = 2.0
"""How long a rank waits for an answer at one port."""
LOOPBACK = "127.0.0.1"
LATEST, HELLO = "latest", "hello"
MAX_REFUSALS = 16
"""Addresses of strangers that are logged."""
ANSWER_PAUSES = 10
"""How often a rank looks for rank 0's answer before it looks for a later attempt."""


def listen_at(host: str, port: int, one_node: bool) -> socket.socket:
    """Return a socket that listens at `host`, the address by which other ranks reach this machine.
    Raises OSError.

    It listens on all interfaces only where that address is none of this machine's own (translated,
    say), or where it is the loopback, which ranks on other nodes do not reach.
    """
    addresses: list[Any] = []
    with suppress(OSError):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in addresses:
        if one_node or not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            try:
                return socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    # None of the addresses is this machine's: others reach it by a translated one, in a container
    # or a cloud.
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    return socket.create_server(
        ("", port), family=family, dualstack_ipv6=dualstack, backlog=BACKLOG
    )


class Introduction:
    """Answers to the other ranks, within its context. log: called once for each address that asks
    without the key."""

    def __init__(
        self,
        listener: socket.socket,
        identity: str,
        store_port: int,
        key: JobKey,
        log: Callable[[str], None],
    ) -> None:
        self._listener, self._identity, self._store_port, self._key = (
            listener,
            identity,
            store_port,
            key,
        )
        self._log, self._logged = log, set[str]()
        self._end = Future[None]()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Introduction":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set_result(None)
        self._thread.join()

    async def _serve(self) -> None:
        with self._listener:
            server = await open_door(self._listener, self._greet)
            await asyncio.wrap_future(self._end)
            server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key, identity, nonce = self._key, self._identity, secrets.token_hex(16)
        # The digest shows those of the job that this is it, and shows others nothing, not even its
        # identity.
        writer.write(
            encode_fields({
                "nonce": nonce,
                "job": _hash_identity(nonce, identity),
                "offer": key.offer,
            })
        )
        if not (line := await reader.readline()).strip():
            return
        fields, answer = parse_fields(line), {}
        if key.is_signed(fields.get("proof"), "a rank", identity, nonce, fields.get("nonce")):
            port = self._store_port
            answer = {
                "port": port,
                "proof": key.sign("rank 0", identity, fields.get("nonce"), port),
            }
        else:
            # A dualstack socket shows IPv4 addresses in IPv6's form.
            address, *_ = writer.get_extra_info("peername") or ("an unknown address",)
            self._refuse(address.removeprefix("::ffff:"))
        writer.write(encode_fields(answer))

    def _refuse(self, address: str) -> None:
        """Log that somebody asked without the key."""
        if address not in self._logged and len(self._logged) < MAX_REFUSALS:
            self._logged.add(address)
            self._log(
                f"refused a process at {address}, which asked for the ranks of this job "
                "without its key."
            )


def find_introduction(
    host: str, port: int, identity: str, environ: Mapping[str, str]
) -> int | None:
    """Return the port of rank 0's store, if rank 0 of this job listens here. environ: the
    environment.

    Raises RendezvousError: rank 0 of this job listens here, and has another key.
    """
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host, port), TRY_SECONDS) as connection,
    ):
        deadline = time.monotonic() + TRY_SECONDS
        first, nonce = _receive_fields(connection, deadline), secrets.token_hex(16)
        # Another job's port, or another program's: the next port may be ours.
        if first.get("job") != _hash_identity(str(first.get("nonce")), identity):
            return None
        key = find_key(str(first.get("offer")), environ)
        proof = key.sign("a rank", identity, first.get("nonce"), nonce)
        connection.sendall(encode_fields({"nonce": nonce, "proof": proof}))
        second = _receive_fields(connection, deadline)
        if not key.is_signed(second.get("proof"), "rank 0", identity, nonce, second.get("port")):
            raise RendezvousError(
                f"rank 0 at {host} does not have the key that this rank has from {key.origin}. "
                f"{SET_IT}."
            )
        return int(second["port"])
    return None


def _hash_identity(nonce: str, identity: str) -> str:
    """Return what distinguishes a job from others, for those who know its identity."""
    return hashlib.sha256(f"{nonce}\n{identity}".encode()).hexdigest()


def _receive_fields(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the fields of a line that whoever listens sends. Raises OSError or ValueError: there
    is none in time."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
        # For each part, since a timeout of the socket begins again with every byte.
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (part := connection.recv(MAX_LINE_BYTES)):
            break
        line += part
    return parse_fields(line)


def read_text(store: Store, key: str) -> str:
    """Return a text from the store, where anybody who reaches it may have written: one line, and
    not too long."""
    text = store.get(key)[:MAX_LINE_BYTES].decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def agree_on_attempt(
    identity: str, rank: int, store_of: Callable[[str], Store], pause: Callable[[], None]
) -> str:
    """Return an identity that this attempt of the job alone has, where the launcher's store
    outlives attempts.

    torchrun counts restarts by node, and an agent that replaces a node begins at 0. So rank 0 draws
    an identity for each attempt, and the others take it from the store once rank 0 has answered
    them, as an earlier one does not.

    identity: of the job. store_of: returns the store of an identity. pause: called while rank 0 is
    waited for.
    """
    store = store_of(identity)
    if rank == 0:
        attempt = f"{identity} {secrets.token_hex(8)}"
        store.set(LATEST, attempt)
        return attempt
    nonce = secrets.token_hex(8)
    while True:
        while not store.check([LATEST]):
            pause()
        attempt = read_text(store, LATEST)
        # A fresh nonce for each process: an answer that an earlier process got is still in the
        # store.
        attempt_store = store_of(attempt)
        attempt_store.set(f"{HELLO}/{rank}", nonce)
        # Then LATEST is read again: rank 0 of a later attempt may have replaced it.
        for _ in range(ANSWER_PAUSES):
            if attempt_store.check([f"{HELLO}/{rank}/{nonce}"]):
                return attempt
            pause()


def answer(store: Store, ranks: Iterable[int]) -> None:
    """Show ranks that ask that rank 0 of this attempt lives. store: of the attempt's identity."""
    for rank in ranks:
        if store.check([f"{HELLO}/{rank}"]):
            store.set(f"{HELLO}/{rank}/{read_text(store, f'{HELLO}/{rank}')}", "")
