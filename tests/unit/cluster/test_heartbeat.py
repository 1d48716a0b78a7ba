"""What rank 0 and the other ranks make of what they hear of each other, and do not hear."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from lightning_distrec.cluster import heartbeat
from lightning_distrec.cluster.heartbeat import Heartbeat, start_heartbeat
from lightning_distrec.cluster.reports import Hub, Link
from lightning_distrec.cluster.verdicts import Judge, RankState, Verdict
from lightning_distrec.errors import RankError, RendezvousError

JOB, LIMIT = "job 1.0", 3.0
JUDGE = Judge(["a", "a", "b"], LIMIT, deadlock_seconds=20.0)
RUNS = [RankState(rank, JOB, started=1) for rank in range(3)]


class Ranks:
    """Rank 0's hub, and links to it."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=400)
        self.address = listener.getsockname()
        self.hub = Hub(JUDGE, listener, JOB)
        self.hub.report(RUNS[0])
        self.links = {rank: Link(JUDGE, self.address, JOB) for rank in (1, 2)}
        for rank, link in self.links.items():
            link.report(RUNS[rank])

    def hear(self, now: float = 0.0) -> None:
        """Let rank 0 receive all that has been sent, and the others what it answers."""
        for _ in range(3):
            self.hub.wait(0.05)
            self.hub.receive(now)
            for link in self.links.values():
                link.wait(0)
                link.receive(now)

    def reasons(self) -> set[str]:
        """Return what they know of who holds them up."""
        return {peer.verdict.running for peer in (self.hub, *self.links.values())}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    made.hear()
    assert made.reasons() == {""}
    yield made
    for peer in (made.hub, *made.links.values()):
        peer.close()


def test_a_rank_that_says_nothing_for_longer_than_the_limit_is_lost(ranks: Ranks) -> None:
    silent = ranks.links.pop(2)
    ranks.links[1].report(RUNS[1])
    ranks.hear(LIMIT + 1)
    (reason,) = ranks.reasons()
    assert reason.startswith("rank 2 on b has been silent for 3 s")
    silent.report(RUNS[2])
    ranks.hear(LIMIT + 1)
    assert ranks.reasons() == {""}, "it was stopped for a moment"
    silent.close()


def test_rank_0_is_lost_where_it_is_gone_or_silent(ranks: Ranks) -> None:
    ranks.links[1].receive(LIMIT + 1)
    assert ranks.links[1].verdict.running.startswith("rank 0 on a has been silent for 3 s")
    ranks.hub.close()
    ranks.links[2].wait(1)
    ranks.links[2].receive(1)
    assert ranks.links[2].verdict.running.startswith("rank 0 on a has died")


def test_what_rank_0_has_said_before_it_went_is_the_reason(ranks: Ranks) -> None:
    failed = replace(RUNS[0], failed=1, failure="ValueError: no")
    ranks.hub.report(failed)
    ranks.hub.close()
    for link in ranks.links.values():
        for _ in range(2):
            link.wait(1)
            link.receive(1)
        assert link.verdict.running == "rank 0 on a failed: ValueError: no"


def test_rank_0_that_has_ended_its_run_may_go(ranks: Ranks) -> None:
    for rank, link in ranks.links.items():
        link.report(replace(RUNS[rank], ended=1))
    ranks.hub.report(replace(RUNS[0], ended=1))
    ranks.hear()
    ranks.hub.close()
    for link in ranks.links.values():
        link.receive(1)
        assert link.verdict.running == ""


def test_a_port_scanner_and_ranks_of_other_jobs_are_not_listened_to(ranks: Ranks) -> None:
    strangers = [socket.create_connection(ranks.address) for _ in range(300)]
    for stranger in strangers[::3]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for stranger in strangers[1::3]:
        stranger.close()
    other = Link(JUDGE, ranks.address, "job 1.1")
    other.report(RankState(2, "job 1.1", started=1, failed=1, failure="ValueError: no"))
    for _ in range(110):
        ranks.hub.receive(0)
    ranks.hear()
    assert ranks.reasons() == {""}
    other.close()
    ranks.hear()
    assert ranks.reasons() == {""}
    for stranger in strangers:
        stranger.close()


def test_a_rank_whose_connection_is_closed_has_died_for_all(ranks: Ranks) -> None:
    """Also where a fork of it, as a worker of a dataloader, outlives it for a while."""
    pid = os.fork()
    if pid == 0:
        time.sleep(3)
        os._exit(0)
    ranks.links.pop(2).close()
    ranks.hear()
    reasons = ranks.reasons()
    os.waitpid(pid, 0)
    assert reasons == {"rank 2 on b has died: its process is gone (killed, or out of memory?)"}


def test_rank_0_that_cannot_be_reached_is_named_with_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(RendezvousError, match=r"rank 1 cannot connect .* set watchdog_seconds=0"):
        start_heartbeat(1, JUDGE, JOB, address, None)


def test_a_failure_is_known_to_the_others_before_the_rank_that_failed_ends() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(JUDGE, listener, JOB)
    hub.report(RUNS[0])
    beat = start_heartbeat(1, JUDGE, JOB, listener.getsockname(), None)
    beat.start_run(str)
    assert beat.explain(ValueError("no")) is None
    for _ in range(2):
        hub.receive(0)
    assert hub.verdict.running == "rank 1 on a failed: ValueError: no"
    beat.report(is_closed=True)
    hub.close()


def test_why_a_collective_has_failed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "ANSWER_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    beat = start_heartbeat(0, JUDGE, JOB, ("", 0), listener)
    other = Link(JUDGE, listener.getsockname(), JOB)
    other.report(replace(RUNS[1], progress="batch 3", location="x.py:1"))
    beat.start_run(lambda: "batch 4")
    failure = RuntimeError("Connection closed by peer")
    reason = beat.explain(failure)
    text = r"a collective failed \(Connection closed by peer\). Where the ranks are: "
    with pytest.raises(RankError, match=rf"{text}rank 0 on a: .*; rank 1 on a: batch 3, x.py:1"):
        raise cast(Exception, reason)
    other.close()
    beat.start_run(lambda: "batch 1")
    assert str(beat.explain(failure)).startswith("rank 1 on a has died")
    beat.report(is_closed=True)


def test_a_rank_lives_whose_progress_cannot_be_read() -> None:
    peer: Any = _Peer()
    peer.is_answered = True
    beat = Heartbeat(1, peer)
    asked: list[int] = []

    def progress() -> str:
        asked.append(1)
        raise AttributeError("a trainer between two states")

    beat.start_run(progress)
    deadline = time.monotonic() + 10
    while len(asked) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    beat.report(is_closed=True)


class _Peer:
    """Rank 0, which answers nothing."""

    judge, job, verdict, is_answered = JUDGE, JOB, Verdict(RUNS[0]), False

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def report(self, state: RankState) -> None:
        self.state = state

    def wait(self, seconds: float) -> None:
        time.sleep(0.01)

    def receive(self, now: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed.set()


def test_a_rank_that_was_silent_may_report_again_before_the_others_fail_for_it() -> None:
    peer: Any = _Peer()
    beat = Heartbeat(1, peer)
    beat.report(is_closed=True)
    peer.verdict = Verdict(RUNS[0], "rank 2 has been silent for 3 s")
    beat.look_for_failures(0.5, 2)
    with pytest.raises(RankError, match="rank 2 has been silent for 3 s"):
        beat.look_for_failures(2.5, 2)


def test_many_ranks_report_less_often_each() -> None:
    seconds = {2: 1.0, 64: 2.0, 1000: 7.5}
    for num_ranks, expected in seconds.items():
        peer: Any = _Peer()
        peer.judge = Judge(num_ranks * [""], silence_seconds=30.0, deadlock_seconds=60.0)
        beat = Heartbeat(1, peer)
        beat.report(is_closed=True)
        assert beat._beat_seconds == expected, num_ranks


def _seconds_until_stuck(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], tuple[bool, int]]
) -> int | None:
    """Return how long a rank waits until it takes itself for stuck; None: not within five times the
    limit.

    answer: whether it waits after some seconds, and its place.
    """
    seconds = 0
    monkeypatch.setattr(heartbeat, "is_waiting", lambda _: answer(seconds)[0])
    monkeypatch.setattr(heartbeat, "find_place", lambda _: answer(seconds)[1])
    peer: Any = _Peer()
    beat = Heartbeat(1, peer)
    beat.start_run(str)
    try:
        for seconds in range(round(5 * JUDGE.deadlock_seconds)):
            beat.report(**beat._look(seconds))
            if peer.state.is_stuck:
                return seconds
        return None
    finally:
        beat.report(is_closed=True)


def test_a_rank_is_stuck_where_it_waits_at_one_place_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(answer: Callable[[int], tuple[bool, int]]) -> int | None:
        return _seconds_until_stuck(monkeypatch, answer)

    # Two looks, five seconds apart, show that the place stays; from then on the limit counts.
    assert seconds(lambda _: (True, 7)) == 5 + JUDGE.deadlock_seconds + 5
    assert seconds(lambda now: (True, now)) is None
    assert seconds(lambda _: (False, 7)) is None
    assert seconds(lambda now: (now % 15 != 0, 7)) is None


def test_a_rank_that_waits_for_another_without_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(heartbeat.os, "kill", lambda pid, _: killed.append(pid))
    peer: Any = _Peer()
    beat = Heartbeat(1, peer)
    beat.start_run(str)
    beat.report(is_closed=True)
    # Its thread would go on if it had not looked yet, and end this process once its clock is later
    # than the times below.
    assert peer.is_closed.wait(timeout=60)
    beat._state = replace(beat._state, is_closed=False)

    def ends(is_held: bool, begin: float, end: float) -> bool:
        peer.verdict = Verdict(RUNS[0], *(["rank 2 has died"] * 2 if is_held else []))
        for now in (begin, end):
            beat._end_if_blocked(now)
        ended = bool(killed)
        killed.clear()
        return ended

    assert not ends(True, 0, heartbeat.GRACE_SECONDS)
    assert not ends(False, 6, 7)
    assert ends(True, 8, 9 + heartbeat.GRACE_SECONDS)
    beat.is_writing = True
    assert not ends(True, 20, 30), "a checkpoint would be lost"
    beat.report(failed=1)
    assert not ends(True, 200, 300), "it ends by itself"
    beat.report(is_leaving=True)
    assert ends(True, 400, 401 + LIMIT)
    assert (
        "Terminating this rank: rank 2 has died, and this rank would wait" in capfd.readouterr()[1]
    )
