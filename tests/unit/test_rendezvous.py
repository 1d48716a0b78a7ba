"""Ranks find those of their own job, and say whom they wait for. Real sockets and stores; ranks are threads here."""

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_distrec.cluster import introduction, rendezvous
from lightning_distrec.cluster.rendezvous import MeetingPoint, meet
from lightning_distrec.errors import RendezvousError
from tests.support.ports import free_ports


@pytest.fixture
def point() -> MeetingPoint:
    """A meeting point with three ports that were free a moment ago."""
    return MeetingPoint("127.0.0.1", tuple(free_ports(3)), "job 1.0")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LOG_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(introduction, "TRY_SECONDS", 0.5)


def _run(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls return or raise, made at the same time."""
    outcomes: list[Any] = [None] * len(calls)

    def run(which: int) -> None:
        try:
            outcomes[which] = calls[which]()
        except Exception as error:
            outcomes[which] = error

    threads = [threading.Thread(target=run, args=(which,)) for which in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def _rank(point: MeetingPoint, rank: int, num_ranks: int, said: list[str], seconds: float = 10) -> Callable[[], str]:
    nodes = [f"node{rank}" for rank in range(num_ranks)]

    def arrive() -> str:
        store = meet(point, rank, num_ranks, seconds, said.append, nodes)
        if rank == 0:
            store.set("who", point.identity)
        name = store.get("who").decode()
        store.set(f"has read {rank}", "")
        if rank == 0:  # its store ends with it
            store.wait([f"has read {other}" for other in range(num_ranks)])
        return name

    return arrive


def test_all_ranks_share_a_store(point: MeetingPoint) -> None:
    said: list[str] = []
    assert _run(*(_rank(point, rank, 3, said) for rank in range(3))) == ["job 1.0"] * 3
    assert said == []


def test_two_jobs_at_the_same_ports_each_find_their_own(point: MeetingPoint) -> None:
    other = replace(point, identity="job 1.1")
    calls = [_rank(job, rank, 2, []) for job in (point, other) for rank in range(2)]
    assert _run(*calls) == ["job 1.0"] * 2 + ["job 1.1"] * 2


def test_an_earlier_attempt_that_still_listens_is_passed_by(point: MeetingPoint) -> None:
    said: list[str] = []
    outcomes = _run(
        _rank(replace(point, identity="job 1.0 restart 0"), 0, 2, [], seconds=3),
        *(_rank(replace(point, identity="job 1.0 restart 1"), rank, 2, said) for rank in range(2)),
    )
    assert outcomes[1:] == ["job 1.0 restart 1"] * 2
    assert isinstance(outcomes[0], RendezvousError)


@pytest.mark.parametrize("greeting", [b"", b"220 mail server ready\n", b"\xff\xfe\n"], ids=["silent", "text", "bytes"])
def test_whoever_else_listens_at_the_port_is_passed_by(point: MeetingPoint, greeting: bytes) -> None:
    with socket.create_server(("", point.ports[0])) as foreign:
        foreign.settimeout(0.1)
        ended, kept = threading.Event(), []

        def serve() -> None:
            while not ended.is_set():
                try:
                    connection, _ = foreign.accept()
                except TimeoutError:
                    continue
                kept.append(connection)
                connection.sendall(greeting)

        server = threading.Thread(target=serve)
        server.start()
        try:
            assert _run(*(_rank(point, rank, 2, []) for rank in range(2))) == ["job 1.0"] * 2
        finally:
            ended.set()
            server.join()
            for connection in kept:
                connection.close()


def test_a_rank_that_is_missing_is_named_on_all(point: MeetingPoint) -> None:
    said: list[str] = []
    outcomes = _run(*(_rank(point, rank, 4, said, seconds=1.5) for rank in (0, 1, 3)))
    wanted = "3 of 4 ranks arrived at 127.0.0.1; missing: rank 2 on node2"
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes)
    assert [str(outcome) for outcome in outcomes] == [f"{wanted}: not within timeout_seconds=1.5."] * 3
    assert said
    assert all(line.startswith(f"{wanted}, after") for line in said), said


def test_a_missing_first_rank_is_reported_by_the_others(point: MeetingPoint) -> None:
    said: list[str] = []
    (outcome,) = _run(_rank(point, 1, 2, said, seconds=1))
    assert str(outcome).startswith(f"waiting for rank 0 at 127.0.0.1, port {point.ports[0]} and 2 others: not within")
    assert said


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


def test_one_rank_needs_nobody(point: MeetingPoint) -> None:
    assert _run(_rank(point, 0, 1, [])) == ["job 1.0"]
