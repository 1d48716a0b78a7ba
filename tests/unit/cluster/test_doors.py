"""The ports at which ranks listen, while strangers connect: they may send anything, or nothing.
Real sockets."""

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from lightning_distrec.cluster.door import (
    MAX_LINE_BYTES,
    encode_fields,
    is_signed,
    open_door,
    parse_fields,
    sign,
)
from lightning_distrec.cluster.introduction import (
    Introduction,
    answer,
    find_introduction,
    listen_at,
)
from lightning_distrec.cluster.job_key import KEY_VARIABLE, choose_key
from lightning_distrec.cluster.rendezvous import MeetingPoint, _Meeting, _Waiting, name_in_store
from lightning_distrec.cluster.watchdog import Watchdog
from lightning_distrec.cluster.watchdog_monitor import Hub, Settings
from lightning_distrec.errors import RendezvousError
from tests.support.parameters import slow_except

HOST, IDENTITY, STORE_PORT = "127.0.0.1", "job 1.0", 1234
ENVIRON = {KEY_VARIABLE: "a secret"}
SETTINGS = Settings(0, 1, [], HOST, 0, None, "a secret", 3.0, 60.0)
COUNTS = slow_except([500], [500, 10_000])
NUM_HALF_OPEN = 800
NESTED = b"[" * 4096 + b"\n"
NAMES = ("rank", "nonce", "proof", "job", "offer", "port", "num_ranks", "watch")
VALUES = (
    "",
    "\ud800",
    "x" * 500,
    "variable",
    0,
    -1,
    2**70,
    1e308,
    None,
    True,
    [[]],
    {"nonce": {}},
    "\n",
    "é",
)
PIECES = [
    b"{",
    b"}",
    b"[",
    b'"nonce":',
    b'"proof":',
    b'"rank":',
    b'"x"',
    b"1e999",
    b"-1",
    b"null",
    b",",
    b"\n",
]


def _messages(count: int) -> Iterator[bytes]:
    """Yield what strangers may send: bytes, pieces of JSON, and lines of JSON with names that are
    expected."""
    random = Random(1)
    for index in range(count):
        if index % 250 == 0:
            yield NESTED
        elif index % 250 == 1:
            yield b"x" * (2 * MAX_LINE_BYTES)
        elif index % 3 == 0:
            yield random.randbytes(random.randrange(100)) + b"\n"
        elif index % 3 == 1:
            yield b"".join(random.choices(PIECES, k=random.randrange(20))) + b"\n"
        else:
            fields = {name: random.choice(VALUES) for name in random.sample(NAMES, 3)}
            yield json.dumps(fields).encode() + b"\n"


def _send_all(port: int, count: int) -> None:
    for message in _messages(count):
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(message)


def _soon(find: Callable[[], Any]) -> Any:
    """Return what is found within some seconds, as a rank tries again until its timeout."""
    deadline = time.monotonic() + 30
    while (result := find()) is None:
        assert time.monotonic() < deadline
    return result


@pytest.fixture
def _nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    yield
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    ] == []
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.fixture
def introduction(_nothing_is_printed: None) -> Iterator[int]:
    """Yield the port at which rank 0 answers."""
    listener, lines = listen_at(HOST, 0, True), list[str]()
    port = listener.getsockname()[1]
    with Introduction(listener, IDENTITY, STORE_PORT, choose_key(ENVIRON), lines.append):
        yield port
    assert len(lines) <= 1, "once for each address"


@pytest.fixture
def hub_port(_nothing_is_printed: None) -> Iterator[int]:
    """Yield the port at which rank 0's watchdog listens; at the end, it must not have heard of any
    rank."""
    hub, listener, loop = Hub(SETTINGS), listen_at(HOST, 0, True), asyncio.new_event_loop()
    loop.run_until_complete(open_door(listener, hub.greet, hub.receive))
    thread = Thread(target=loop.run_forever)
    thread.start()
    yield listener.getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert hub._states == {}


def _greet_hub(port: int) -> bool | None:
    """Return whether the hub knows its token, as seen by a rank that proves to have it, too; None:
    no answer."""
    with socket.create_connection((HOST, port), 5) as connection:
        lines = connection.makefile("rb")
        if not (line := lines.readline()):
            return None
        proof = sign(b"a secret", "rank", 1, parse_fields(line)["nonce"], "drawn")
        connection.sendall(encode_fields({"rank": 1, "nonce": "drawn", "proof": proof}))
        return is_signed(b"a secret", parse_fields(lines.readline()).get("proof"), "hub", "drawn")


@pytest.mark.parametrize("count", COUNTS)
def test_the_introduction_survives_whatever_strangers_send(introduction: int, count: int) -> None:
    _send_all(introduction, count)
    assert _soon(lambda: find_introduction(HOST, introduction, IDENTITY, ENVIRON)) == STORE_PORT


@pytest.mark.parametrize("count", COUNTS)
def test_the_watchdog_survives_whatever_strangers_send(hub_port: int, count: int) -> None:
    _send_all(hub_port, count)
    assert _soon(lambda: _greet_hub(hub_port))


def test_the_store_survives_whatever_strangers_send() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    _send_all(store.port, 300)  # torch looks up a stack trace for each
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_ranks_refuse_whatever_strangers_write_into_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret")
    monkeypatch.setattr("lightning_distrec.cluster.rendezvous.PAUSE_SECONDS", 0)
    point, waiting = MeetingPoint(HOST, (1,), IDENTITY), _Waiting(10, print, str)
    ports = list[int]()

    def watch(port: int, token: str) -> int:
        ports.append(port)
        return port

    for message in _messages(10_000):
        store, first = HashStore(), _Meeting(point, 0, 2, (), watch, waiting)
        for key in ("hello/1", "arrived/1", "challenge", "complete", "complete/1/proof"):
            store.set(key, message)
        answer(store, [1])
        with pytest.raises(RendezvousError, match="rank 1 does not have the key of this job"):
            first._check_arrived(store, 1, choose_key(ENVIRON), "nonce")
        with pytest.raises(
            RendezvousError, match="does not have the key of this job|names a kind of key"
        ):
            _Meeting(point, 1, 2, (), watch, waiting)._arrive(store)
    assert set(ports) <= {0, 1}, "no number of a port beyond the last"


def test_what_a_stranger_writes_as_failure_is_one_printable_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret")
    store = HashStore()
    store.set("challenge", json.dumps({"nonce": "x", "offer": "variable", "watch": "no port"}))
    store.set("complete", b"failed: \x1b[2J\xff no\nrank" + b"x" * 100_000)
    meeting = _Meeting(
        MeetingPoint(HOST, (1,), IDENTITY), 1, 2, (), lambda port, _: port, _Waiting(10, print, str)
    )
    with pytest.raises(RendezvousError) as refused:
        meeting._arrive(store)
    assert str(refused.value).startswith("?[2J\ufffd no?rankxx")
    assert len(str(refused.value)) <= MAX_LINE_BYTES


def test_a_jobs_name_that_is_none_of_ours_becomes_no_files_name() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    point = MeetingPoint(HOST, (store.port,), IDENTITY, is_hosted=True)
    assert name_in_store(point, 0) == name_in_store(point, 0)
    assert name_in_store(point, 0).startswith("torchrun-")
    store.set("lightning_distrec/job/lightning_distrec/job", "../../x")
    with pytest.raises(
        RendezvousError, match="somebody else has written into torchrun's store at 127.0.0.1. Start"
    ):
        name_in_store(point, 0)


def test_half_open_connections_keep_no_rank_out(introduction: int, hub_port: int) -> None:
    strangers = [
        socket.create_connection((HOST, port))
        for port in (introduction, hub_port)
        for _ in range(400)
    ]
    strangers += [
        socket.create_connection((HOST, introduction)) for _ in range(NUM_HALF_OPEN - 400)
    ]
    assert _soon(lambda: find_introduction(HOST, introduction, IDENTITY, ENVIRON)) == STORE_PORT
    assert _soon(lambda: _greet_hub(hub_port))
    open_strangers = 0
    for stranger in strangers:
        stranger.settimeout(0)
        try:
            while stranger.recv(4096):
                pass
        except BlockingIOError:
            open_strangers += 1
        except ConnectionResetError:
            pass
        stranger.close()
    assert open_strangers <= 2 * 128 + 2


def test_who_sends_a_byte_now_and_then_is_not_waited_for(introduction: int) -> None:
    """On both sides: at rank 0, and by a rank that has come to somebody else's port."""
    began = time.monotonic()
    with socket.create_connection((HOST, introduction)) as stranger:
        _drip(stranger)
    with socket.create_server((HOST, 0)) as foreign:

        def serve() -> None:
            connection, _ = foreign.accept()
            with connection:
                _drip(connection)

        thread = Thread(target=serve)
        thread.start()
        assert find_introduction(HOST, foreign.getsockname()[1], IDENTITY, ENVIRON) is None
        thread.join()
    assert time.monotonic() < began + 30


def _drip(connection: socket.socket) -> None:
    """Send until the other side closes the connection."""
    with suppress(ConnectionError):
        for _ in range(300):
            connection.sendall(b"x")
            time.sleep(0.2)


def test_the_watchdogs_token_is_in_no_command_line_and_no_environment() -> None:
    listener = listen_at(HOST, 0, True)
    port, token = listener.getsockname()[1], secrets.token_hex(16)
    watchdog = Watchdog(
        Settings(0, os.getpid(), [], HOST, port, listener.fileno(), token, 3.0, 60.0), listener
    )
    monitor = Path("/proc", str(watchdog._process.pid))
    _soon(lambda: b"watchdog_monitor" in (monitor / "cmdline").read_bytes() or None)
    assert (
        token.encode()
        not in (monitor / "cmdline").read_bytes() + (monitor / "environ").read_bytes()
    )
    watchdog.send(is_closed=True)
    assert watchdog._process.wait(60) == 0, "it has read its settings, and ends when it is asked to"
