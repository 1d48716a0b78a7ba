"""The sockets by which a rank finds rank 0's store: rank 0 sends its port to those who have the key of the job.

Plain sockets, with a timeout for each wait: torch's TCPStore client waits without end for a listener that is not a
store, another job's for example.
"""

import errno
import hashlib
import ipaddress
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from lightning_distrec.cluster.job_key import SET_IT, JobKey, find_key
from lightning_distrec.errors import RendezvousError

TRY_SECONDS = 2.0
"""How long each side waits for the other."""
STOP_SECONDS = 0.1
MAX_LINE_BYTES = 4096
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
LATEST, HELLO = "latest", "hello"
ANSWER_PAUSES = 10
"""How often a rank looks for rank 0's answer before it looks for a later attempt."""


def listen_at(host: str, port: int, one_node: bool) -> socket.socket:
    """Return a socket that listens at `host`, the address by which other ranks reach this machine. Raises OSError.

    It listens on all interfaces only where that address is none of this machine's own (translated, say), or where it is
    the loopback, which ranks on other nodes do not reach.
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
    # None of the addresses is this machine's: others reach it by a translated one, in a container or a cloud.
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dualstack, backlog=BACKLOG)


class Introduction(socketserver.ThreadingTCPServer):
    """Answers to the other ranks, within its context. log: called once for each address that asks without the key."""

    # server_close would wait for the threads of clients that are still connected.
    daemon_threads = True

    def __init__(
        self, listener: socket.socket, identity: str, store_port: int, key: JobKey, log: Callable[[str], None]
    ) -> None:
        self.identity, self.store_port, self.key = identity, store_port, key
        self._log, self._logged = log, set[str]()
        # socketserver makes a socket in any case; the listener has been bound already.
        super().__init__(("", 0), _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def __enter__(self) -> "Introduction":
        threading.Thread(target=self.serve_forever, args=(STOP_SECONDS,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def refuse(self, address: str) -> None:
        """Log that somebody asked without the key."""
        if address not in self._logged:
            self._logged.add(address)
            self._log(f"refused a process at {address}, which asked for the ranks of this job without its key.")


class _Answer(socketserver.StreamRequestHandler):
    server: Introduction
    timeout = TRY_SECONDS

    def handle(self) -> None:
        with suppress(OSError, ValueError):
            key, identity, nonce = self.server.key, self.server.identity, secrets.token_hex(16)
            # The digest shows those of the job that this is it, and shows others nothing, not even its identity.
            self._send({"nonce": nonce, "job": _hash_identity(nonce, identity), "offer": key.offer})
            if (answer := self.rfile.readline(MAX_LINE_BYTES)).strip():
                answer_fields = parse_fields(answer)
                if key.is_signed(answer_fields.get("proof"), "a rank", identity, nonce, answer_fields.get("nonce")):
                    port = self.server.store_port
                    self._send({"port": port, "proof": key.sign("rank 0", identity, answer_fields["nonce"], port)})
                else:
                    # A dualstack socket shows IPv4 addresses in IPv6's form.
                    self.server.refuse(self.client_address[0].removeprefix("::ffff:"))
                    self._send({})

    def _send(self, fields: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(fields).encode() + b"\n")


def find_introduction(host: str, port: int, identity: str, environ: Mapping[str, str]) -> int | None:
    """Return the port of rank 0's store, if rank 0 of this job listens here. environ: the environment.

    Raises RendezvousError: rank 0 of this job listens here, and has another key.
    """
    with suppress(OSError, ValueError), socket.create_connection((host, port), TRY_SECONDS) as connection:
        lines = connection.makefile("rb")
        first, nonce = parse_fields(lines.readline(MAX_LINE_BYTES)), secrets.token_hex(16)
        # Another job's port, or another program's: the next port may be ours.
        if first.get("job") != _hash_identity(str(first.get("nonce")), identity):
            return None
        key = find_key(str(first.get("offer")), environ)
        proof = key.sign("a rank", identity, first["nonce"], nonce)
        connection.sendall(json.dumps({"nonce": nonce, "proof": proof}).encode() + b"\n")
        second = parse_fields(lines.readline(MAX_LINE_BYTES))
        if not key.is_signed(second.get("proof"), "rank 0", identity, nonce, second.get("port")):
            raise RendezvousError(
                f"rank 0 at {host} does not have the key that this rank has from {key.origin}. {SET_IT}."
            )
        return int(second["port"])
    return None


def _hash_identity(nonce: str, identity: str) -> str:
    """Return what distinguishes a job from others, for those who know its identity."""
    return hashlib.sha256(f"{nonce}\n{identity}".encode()).hexdigest()


def parse_fields(line: bytes) -> dict[str, Any]:
    """Return the fields of a line of JSON. Raises ValueError: it is none."""
    fields = json.loads(line)
    return fields if isinstance(fields, dict) else {}


def agree_on_attempt(identity: str, rank: int, store_of: Callable[[str], Store], pause: Callable[[], None]) -> str:
    """Return an identity that this attempt of the job alone has, where the launcher's store outlives attempts.

    torchrun counts restarts by node, and an agent that replaces a node begins at 0. So rank 0 draws an identity for
    each attempt, and the others take it from the store once rank 0 has answered them, as an earlier one does not.

    identity: of the job. store_of: returns the store of an identity. pause: called while rank 0 is waited for.
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
        attempt = store.get(LATEST).decode()
        # A fresh nonce for each process: an answer that an earlier process got is still in the store.
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
            store.set(f"{HELLO}/{rank}/{store.get(f'{HELLO}/{rank}').decode()}", "")
