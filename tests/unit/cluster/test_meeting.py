"""Ranks find those of their own job, and say whom they wait for. Real sockets and stores; ranks are
threads here."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from lightning_distrec.cluster import meeting
from lightning_distrec.cluster.host_resources import listen_at
from lightning_distrec.cluster.launched import MeetingPoint
from lightning_distrec.cluster.meeting import meet
from lightning_distrec.errors import RendezvousError
from tests.support.ports import free_ports


@pytest.fixture
def point() -> MeetingPoint:
    """A meeting point with three ports that were free a moment ago."""
    return MeetingPoint("127.0.0.1", tuple(free_ports(3)), "job 1.0")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOG_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "TRY_SECONDS", 0.5)


def _run(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls return or raise, made at the same time."""
    outcomes: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def _rank(
    point: MeetingPoint, rank: int, num_ranks: int, lines: list[str], seconds: float = 10
) -> Callable[[], str]:
    nodes = [f"node{rank}" for rank in range(num_ranks)]

    def arrive() -> str:
        store = meet(point, rank, num_ranks, seconds, lines.append, nodes)
        if rank == 0:
            store.set("who", point.identity)
        name = store.get("who").decode()
        store.set(f"has read {rank}", "")
        if rank == 0:  # its store ends with it
            store.wait([f"has read {other}" for other in range(num_ranks)])
        return name

    return arrive


def test_two_jobs_at_the_same_ports_each_find_their_own(point: MeetingPoint) -> None:
    other = replace(point, identity="job 1.1")
    calls = [_rank(job, rank, 2, []) for job in (point, other) for rank in range(2)]
    assert _run(*calls) == ["job 1.0"] * 2 + ["job 1.1"] * 2


@pytest.mark.parametrize(
    "greeting",
    [b"", b"\xff\xfe\n", b'{"job": "job 0.9", "port": 1}'],
    ids=["silent", "bytes", "rank 0 of another job"],
)
def test_whoever_else_listens_at_the_port_is_passed_by(
    point: MeetingPoint, greeting: bytes
) -> None:
    with socket.create_server(("", point.ports[0])) as foreign:
        foreign.settimeout(0.1)
        ended, connections = threading.Event(), []

        def serve() -> None:
            while not ended.is_set():
                try:
                    connection, _ = foreign.accept()
                except TimeoutError:
                    continue
                connections.append(connection)
                connection.sendall(greeting)

        server = threading.Thread(target=serve)
        server.start()
        try:
            assert _run(*(_rank(point, rank, 2, []) for rank in range(2))) == ["job 1.0"] * 2
        finally:
            ended.set()
            server.join()
            for connection in connections:
                connection.close()


def test_a_rank_that_is_missing_is_named_on_all(point: MeetingPoint) -> None:
    lines: list[str] = []
    outcomes = _run(*(_rank(point, rank, 4, lines, seconds=1.5) for rank in (0, 1, 3)))
    expected = "3 of 4 ranks arrived at 127.0.0.1; waiting for rank 2 on node2"
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes)
    assert [str(outcome) for outcome in outcomes] == [
        f"{expected}: not within 1.5 s (start_seconds, or timeout_seconds)."
    ] * 3
    assert lines
    assert all(line.startswith(f"{expected}, after") for line in lines), lines


def test_ranks_that_count_differently_are_reported(point: MeetingPoint) -> None:
    outcomes = _run(_rank(point, 0, 2, []), _rank(point, 1, 3, []))
    assert [str(outcome) for outcome in outcomes] == [
        "rank 0 expects 2 ranks, and rank 1 expects 3: start all with one number."
    ] * 2


def test_no_free_port_is_an_error_of_rank_0(point: MeetingPoint) -> None:
    servers = [socket.create_server(("", port)) for port in point.ports]
    try:
        (outcome,) = _run(_rank(point, 0, 2, []))
        assert "is free on 127.0.0.1. Set MASTER_PORT" in str(outcome)
    finally:
        for server in servers:
            server.close()


def _other_than(earlier_attempt: str, job_store: PrefixStore) -> str:
    """Return the identity of the attempt after another, once it is there."""
    while not job_store.check(["latest"]) or job_store.get("latest").decode() == earlier_attempt:
        time.sleep(0.02)
    return job_store.get("latest").decode()


def test_attempts_in_a_launchers_store_do_not_meet_what_is_left_of_earlier_ones(
    point: MeetingPoint,
) -> None:
    """Also where one of the ranks comes first, as that of a node that was replaced may."""
    agent = TCPStore("127.0.0.1", point.ports[0], is_master=True, wait_for_workers=False)
    hosted = replace(point, ports=point.ports[:1], is_hosted=True)
    assert _run(*(_rank(hosted, rank, 2, []) for rank in range(2))) == ["job 1.0"] * 2
    earlier_attempt = PrefixStore(hosted.identity, agent).get("latest").decode()

    def late() -> Any:
        time.sleep(1.5)
        return _rank(hosted, 0, 2, [])()

    assert _run(late, _rank(hosted, 1, 2, [])) == ["job 1.0"] * 2
    assert _other_than(earlier_attempt, PrefixStore(hosted.identity, agent)) != earlier_attempt


def test_two_processes_of_one_number_are_refused(point: MeetingPoint) -> None:
    outcomes = _run(*(_rank(point, rank, 3, [], seconds=2) for rank in (0, 1, 1)))
    assert "two processes are rank 1 (RANK): start one of each." in map(str, outcomes[1:])
    assert "2 of 3 ranks arrived at 127.0.0.1; waiting for rank 2" in str(outcomes[0])


def test_a_port_scanner_keeps_no_rank_out(point: MeetingPoint) -> None:
    lines: list[str] = []

    def scan_then_arrive() -> str:
        strangers = []
        while len(strangers) < 300:
            with suppress(ConnectionRefusedError):
                strangers.append(socket.create_connection((point.host, point.ports[0])))
                strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * (len(strangers) % 2))
        outcome = _rank(point, 1, 2, lines)()
        for stranger in strangers:
            stranger.close()
        return outcome

    assert _run(_rank(point, 0, 2, lines), scan_then_arrive) == ["job 1.0"] * 2


def test_on_one_node_nothing_listens_beyond_the_address_that_ranks_use(point: MeetingPoint) -> None:
    """127.0.0.2 reaches what listens at all interfaces, and not what listens at 127.0.0.1."""
    assert _reaches("127.0.0.2", listen_at("0.0.0.0", 0, one_node=False))
    assert not _reaches("127.0.0.2", listen_at("127.0.0.1", 0, one_node=True))
    assert _reaches("127.0.0.2", listen_at("127.0.0.1", 0, one_node=False)), (
        "other nodes do not reach a loopback"
    )
    assert _reaches("127.0.0.2", listen_at("203.0.113.1", 0, one_node=False)), (
        "an address of a router"
    )
    assert not _reaches("127.0.0.1", listen_at("127.0.0.3", 0, one_node=True))


def _reaches(host: str, listener: socket.socket) -> bool:
    with listener:
        try:
            socket.create_connection((host, listener.getsockname()[1]), 1).close()
        except ConnectionRefusedError:
            return False
        return True


def test_a_rank_whose_launching_process_is_gone_waits_for_nobody(point: MeetingPoint) -> None:
    began = time.monotonic()
    lines: list[str] = []
    (outcome,) = _run(
        _rank(
            replace(point, find_loss=lambda: "the process that started this rank is gone"),
            1,
            2,
            lines,
        )
    )
    assert [str(outcome)] == lines == ["the process that started this rank is gone"]
    assert time.monotonic() - began < 5
