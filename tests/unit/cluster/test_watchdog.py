"""What rank 0's process makes of what it hears of the ranks, and what a rank says of its own
failures."""

import _thread
import asyncio
import contextlib
import functools
import json
import mmap
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError, HashStore

from lightning_distrec.cluster.door import encode_fields, open_door, read_fields, sign
from lightning_distrec.cluster.watchdog import Watchdog, find_location, is_network_failure
from lightning_distrec.cluster.watchdog_monitor import (
    TICK_SECONDS,
    Hub,
    HubMessage,
    Monitor,
    RankState,
    Settings,
    encode_line,
)
from lightning_distrec.errors import RankError

SETTINGS = Settings(0, 1, ["a", "a", "b"], "127.0.0.1", 0, None, "a secret", 3.0, 60.0)
RUNS = [RankState(rank, started=1, location="x.py:1", progress="batch 1") for rank in range(3)]


async def _connect(
    port: int, rank: int, token: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    proof = sign(token.encode(), "rank", rank, (await read_fields(reader))["nonce"], "drawn")
    writer.write(encode_fields({"rank": rank, "nonce": "drawn", "proof": proof}))
    # The hub proves that it has the token, too; to a stranger it says nothing.
    if line := await reader.readline():
        assert json.loads(line) == {"proof": sign(token.encode(), "hub", "drawn")}
    return reader, writer


async def _receive(
    states: list[RankState], num_ticks: int, token: str, ranks: list[int] | None = None
) -> HubMessage:
    """Return what the hub says last to the rank of the first state. ranks: as which the states'
    senders connect."""
    hub, listener = Hub(SETTINGS), socket.create_server(("127.0.0.1", 0))
    await open_door(listener, hub.greet, hub.receive)
    port = listener.getsockname()[1]
    connections = [
        await _connect(port, rank, token) for rank in ranks or [state.rank for state in states]
    ]
    for (_, writer), state in zip(connections, states, strict=True):
        writer.write(encode_line(state))
    reader, writer = connections[0]
    await asyncio.sleep(0.1)
    for _ in range(num_ticks):
        hub.tick()
        for (_, writer), state in zip(connections, states, strict=True):
            if not state.location.startswith("silent"):
                writer.write(encode_line(state))
        await asyncio.sleep(0.005)
    received = b""
    while chunk := await _at_once(reader):
        received += chunk
    for _, writer in connections:
        writer.close()
        with contextlib.suppress(ConnectionError):  # the hub has closed it first
            await writer.wait_closed()
    return HubMessage(**json.loads(received.splitlines()[-1])) if received else HubMessage()


async def _at_once(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
        return await asyncio.wait_for(reader.read(1 << 16), 0.2)
    return b""


def _verdict(*states: RankState, num_ticks: int = 1) -> str:
    return asyncio.run(_receive(list(states), num_ticks, SETTINGS.token)).verdict


ENDED = [replace(state, ended=1) for state in RUNS]
CASES = {
    "all run": (RUNS, ""),
    "one is gone": ([*RUNS[:2], replace(RUNS[2], is_gone=True)], "rank 2 on b has died"),
    "one is gone, and the others do not need it": (
        [*ENDED[:2], replace(ENDED[2], is_gone=True)],
        "",
    ),
    "one has left between two runs, the others go on": (
        [
            replace(RUNS[0], started=2, ended=1),
            replace(RUNS[1], started=2, ended=1),
            replace(ENDED[2], is_gone=True),
        ],
        "rank 2 on b has died",
    ),
    "one is stopped": (
        [RUNS[0], replace(RUNS[1], is_stopped=True), RUNS[2]],
        "rank 1 on a has been stopped for 3 s",
    ),
    "one is stopped between two runs": ([*ENDED[:2], replace(ENDED[2], is_stopped=True)], ""),
    "one has failed": (
        [RUNS[0], RUNS[1], replace(RUNS[2], failed=1, failure="ValueError: no")],
        "rank 2 on b failed: ValueError: no",
    ),
    "all have failed": ([replace(state, failed=1, failure="ValueError: no") for state in RUNS], ""),
    "one has failed, and has ended since": (
        [RUNS[0], RUNS[1], replace(RUNS[2], failed=1, failure="ValueError: no", is_gone=True)],
        "rank 2 on b failed: ValueError: no",
    ),
    "one was killed, another failed because of it": (
        [
            RUNS[0],
            replace(RUNS[1], failed=1, failure="RuntimeError: closed"),
            replace(RUNS[2], is_gone=True),
        ],
        "rank 2 on b has died",
    ),
    "one has failed, another repeats that and is gone": (
        [
            RUNS[0],
            replace(RUNS[1], failed=1, is_gone=True),
            replace(RUNS[2], failed=1, failure="ValueError: no"),
        ],
        "rank 2 on b failed: ValueError: no",
    ),
    "one goes on with another run after a failure that it caught": (
        [replace(RUNS[0], started=2, failed=1, failure="ValueError: no"), RUNS[1], RUNS[2]],
        "rank 0 on a failed: ValueError: no",
    ),
    "one was stopped, and ended for it, as another was": (
        [
            RUNS[0],
            *(
                replace(state, killed_for="rank 2 on b has been stopped", is_gone=True)
                for state in RUNS[1:]
            ),
        ],
        "rank 2 on b has been stopped",
    ),
    "all but one have ended after a collective that it did not make": (
        [RUNS[0], *(replace(state, failed=1, is_gone=True) for state in RUNS[1:])],
        "rank 1 on a has ended after a failed collective",
    ),
    "all wait, each for the others": (
        [
            replace(state, is_stuck=True, progress=f"exchanges {min(state.rank, 1)}")
            for state in RUNS
        ],
        "ranks wait in different exchanges for 60 s: rank 0 on a: exchanges 0, x.py:1; ranks 1, "
        "2: exchanges 1, x.py:1",
    ),
    "all wait in one exchange": ([replace(state, is_stuck=True) for state in RUNS], ""),
    "one takes long, and the others wait for it": (
        [*(replace(state, is_stuck=True, progress="exchanges 1") for state in RUNS[:2]), RUNS[2]],
        "",
    ),
    "one whose collective has failed has not ended yet": (
        [*RUNS[:2], replace(RUNS[2], failed=1)],
        "",
    ),
    "one is not watched any more": (
        [*RUNS[:2], replace(RUNS[2], is_closed=True, is_gone=True)],
        "",
    ),
}


LEAVING = [replace(state, failed=1, is_leaving=True) for state in RUNS]
CASES_OF_LEAVING = {
    "all are leaving": (LEAVING, ""),
    "one is gone": ([*LEAVING[:2], replace(RUNS[2], is_gone=True)], "rank 2 on b has died"),
    "one has failed and is gone": (
        [*LEAVING[:2], replace(LEAVING[2], failure="ValueError: no", is_gone=True)],
        "rank 2 on b failed: ValueError: no",
    ),
    "one has failed and is leaving too": (
        [*LEAVING[:2], replace(LEAVING[2], failure="ValueError: no")],
        "",
    ),
    "one is gone, and the others have left": (
        [
            *(replace(state, is_leaving=False) for state in LEAVING[:2]),
            replace(RUNS[2], is_gone=True),
        ],
        "",
    ),
}


@pytest.mark.parametrize("case", CASES_OF_LEAVING)
def test_who_holds_ranks_up_that_are_leaving(case: str) -> None:
    states, expected = CASES_OF_LEAVING[case]
    message = asyncio.run(_receive(list(states), 1, SETTINGS.token))
    assert message.verdict_for_leaving.startswith(expected)
    assert bool(message.verdict_for_leaving) == bool(expected)
    assert message.verdict == "", "none of them is running"


@pytest.mark.parametrize("case", CASES)
def test_who_holds_the_others_up(case: str) -> None:
    states, expected = CASES[case]
    verdict = _verdict(*states)
    assert verdict.startswith(expected)
    assert bool(verdict) == bool(expected)


def test_who_is_silent_for_longer_than_the_limit_holds_the_others_up() -> None:
    states = (RUNS[0], RUNS[1], replace(RUNS[2], location="silent"))
    limit = round(SETTINGS.silence_seconds / TICK_SECONDS)
    assert _verdict(*states, num_ticks=limit) == ""
    assert _verdict(*states, num_ticks=limit + 2).startswith("rank 2 on b has been silent for 3 s")


def test_where_ranks_are_is_told_when_one_asks() -> None:
    parted = [
        replace(RUNS[0], is_asking=True),
        RUNS[1],
        replace(RUNS[2], location="y.py:7 in f (all_reduce)"),
    ]
    assert asyncio.run(_receive(parted, 1, SETTINGS.token)).locations == (
        "ranks 0, 1: batch 1, x.py:1; rank 2 on b: batch 1, y.py:7 in f (all_reduce)"
    )
    assert asyncio.run(_receive(RUNS, 1, SETTINGS.token)).locations == ""


async def _write_before_reading() -> str:
    """Return the verdict of a hub that is busy while a rank dies, and whose next two messages come
    before it reads."""
    hub, listener = Hub(SETTINGS), socket.create_server(("127.0.0.1", 0))
    await open_door(listener, hub.greet, hub.receive)
    port = listener.getsockname()[1]
    reader, writer = await _connect(port, 0, SETTINGS.token)
    writer.write(encode_line(RUNS[0]))
    has_connected, has_died = threading.Event(), threading.Event()

    async def watch_rank() -> None:
        from_rank = asyncio.StreamReader()
        from_rank.feed_data(encode_fields({"started": 1}))
        settings = replace(SETTINGS, rank=2, port=port, pid=os.getppid())
        watch = asyncio.create_task(Monitor(settings, from_rank).run())
        await asyncio.to_thread(has_connected.wait)
        from_rank.feed_data(encode_fields({"is_gone": True}))
        await asyncio.sleep(0)
        has_died.set()
        await watch

    watcher = asyncio.create_task(asyncio.to_thread(asyncio.run, watch_rank()))
    while b'"verdict": ""' not in await _at_once(reader) or len(hub._writers) < 2:
        hub.tick()
    has_connected.set()
    has_died.wait()
    for _ in range(3):
        time.sleep(2 * TICK_SECONDS)
        hub.tick()
    await watcher
    hub.tick()
    received = b""
    while chunk := await _at_once(reader):
        received += chunk
    writer.close()
    return HubMessage(**json.loads(received.splitlines()[-1])).verdict


def test_a_busy_hub_hears_of_a_death_after_it_has_written_to_the_dead_ranks_process() -> None:
    assert asyncio.run(_write_before_reading()).startswith("rank 2 on b has died")


def test_a_stranger_is_not_listened_to() -> None:
    message = asyncio.run(_receive([replace(RUNS[0], is_gone=True), RUNS[1]], 1, "another secret"))
    assert message == HubMessage()


def test_a_rank_is_believed_of_itself_alone() -> None:
    states = [RUNS[0], replace(RUNS[1], is_gone=True)]
    assert asyncio.run(_receive(states, 1, SETTINGS.token)).verdict.startswith(
        "rank 1 on a has died"
    )
    assert asyncio.run(_receive(states, 1, SETTINGS.token, ranks=[0, 2])) == HubMessage()


@pytest.mark.parametrize(
    ("failure", "is_it"),
    [
        (
            RuntimeError(
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
            ),
            True,
        ),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (DistNetworkError("The client socket has timed out"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (RankError("rank 1 failed in a lookup: gloo"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_may_be_another_ranks_doing(failure: BaseException, is_it: bool) -> None:
    assert is_network_failure(failure) == is_it


def test_a_place_is_the_users_own_line_and_what_it_called_there() -> None:
    seen: list[str] = []

    def look(*_: object) -> str:
        seen.append(find_location(traceback.walk_stack(sys._getframe(1))))
        return "{}"

    json.dumps({}, cls=lambda **_: type("Encoder", (), {"encode": look})())
    (location,) = seen
    assert location.startswith("test_watchdog.py:")
    assert location.endswith(
        "in test_a_place_is_the_users_own_line_and_what_it_called_there (dumps)"
    )


def test_a_main_thread_that_just_enters_a_function_is_not_taken_for_one_that_waits() -> None:
    lock = threading.Lock()
    lock.acquire()

    def enter() -> None:
        lock.acquire()

    # a frame without a line, as Python has it on entry
    enter.__code__ = enter.__code__.replace(co_linetable=b"")
    (thread := threading.Thread(target=enter)).start()
    watchdog = cast(Watchdog, SimpleNamespace(_main=thread.ident, _progress=None))
    assert sys._current_frames()[cast(int, thread.ident)].f_lineno is None
    assert not Watchdog._is_waiting(watchdog)
    lock.release()
    thread.join()


async def _seconds_until_stuck(answer: Callable[[int], dict[str, object]]) -> float | None:
    """Return how long a rank waits until its process takes it for stuck; None: not within five
    times the limit.

    answer: returns what the rank answers when its process asks.
    """
    limit = 4 * TICK_SECONDS
    monitor = Monitor(replace(SETTINGS, deadlock_seconds=limit), asyncio.StreamReader())
    monitor._change(started=1)
    for tick in range(round(5 * limit / TICK_SECONDS)):
        if monitor._watch_exchange():
            monitor._change(**answer(tick))
        if monitor._state.is_stuck:
            return tick * TICK_SECONDS
    return None


def test_a_rank_is_stuck_where_it_waits_at_one_place_and_nowhere_else() -> None:
    waits: dict[str, object] = {"is_waiting": True, "place": 7}

    def seconds(answer: Callable[[int], dict[str, object]]) -> float | None:
        return asyncio.run(_seconds_until_stuck(answer))

    # Two answers show the place, and that it stays; from then on the limit counts.
    assert seconds(lambda _: waits) == 6 * TICK_SECONDS
    assert seconds(lambda tick: waits | {"place": tick}) is None
    assert seconds(lambda _: {"is_waiting": False, "place": 7}) is None
    assert seconds(lambda tick: waits if tick < 4 else {}) is None, (
        "it holds the interpreter, and does not answer"
    )


def _look_at(run: Callable[[threading.Event], object]) -> tuple[set[bool], int]:
    """Run something that ends with an event, and look at it. Return whether it waits, and at how
    many places it was.

    This thread runs it, and another one looks.
    """
    watchdog = Watchdog.__new__(Watchdog)
    watchdog._main, watchdog._progress = threading.get_ident(), str
    waits: list[bool] = []
    places: list[int] = []
    event = threading.Event()

    def look() -> None:
        time.sleep(0.1)
        for _ in range(8):
            time.sleep(0.1)
            waits.append(watchdog._is_waiting())
            places.append(watchdog._place(""))
        event.set()

    (thread := threading.Thread(target=look, daemon=True)).start()
    run(event)
    thread.join()
    return set(waits), len(set(places))


def _blocked(event: threading.Event) -> "functools.partial[bool]":
    """Return a call into C that lasts until an event."""
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: event.wait() and lock.release(), daemon=True).start()
    return functools.partial(lock.acquire, timeout=60)


def test_waits_are_told_from_work() -> None:
    store = HashStore()

    def wait(_: threading.Event) -> None:
        with contextlib.suppress(DistStoreError):
            store.wait(["never"], timedelta(seconds=3))

    def wait_for_gpu(event: threading.Event) -> None:
        bool(SimpleNamespace(item=_blocked(event)).item())

    def compute_with_what_was_waited_for(event: threading.Event) -> None:
        with contextlib.suppress(AttributeError):
            SimpleNamespace(item=_blocked(event)).item().svd()

    def loop(event: threading.Event) -> None:
        while not event.is_set():
            sum(range(1000))

    assert _look_at(wait) == ({True}, 1)
    assert _look_at(wait_for_gpu) == ({False}, 1), "without a GPU it computes"
    with patch.object(torch.cuda, "is_initialized", lambda: True):
        assert _look_at(wait_for_gpu) == ({True}, 1), "a GPU is waited for like this"
        assert _look_at(compute_with_what_was_waited_for) == ({False}, 1)
    assert _look_at(loop)[0] == {False}


def test_a_thread_that_computes_or_copies_is_at_other_places() -> None:
    watchdog = Watchdog.__new__(Watchdog)
    watchdog._main = threading.get_ident()

    def places(work: Callable[[], object]) -> int:
        return len({(work(), watchdog._place(""))[1] for _ in range(2)})

    def compute() -> None:
        began = time.thread_time()
        while time.thread_time() < began + 1:
            pass

    def copy() -> None:
        mmap.mmap(-1, 2000 * mmap.PAGESIZE).write(bytes(2000 * mmap.PAGESIZE))

    assert places(compute) == 2
    assert places(int) == 1
    with patch.object(torch.cuda, "is_initialized", lambda: True):
        assert places(compute) == 1, "a wait for a GPU takes a processor"
        assert places(copy) == 2


# As torch/autograd/graph.py, where the main thread is while backward runs on a thread of the GPU's.
ENGINE = "def _engine_run_backward(call):\n    call()"


def test_what_runs_in_backward_on_a_gpu_is_work() -> None:
    engine: dict[str, Callable[[object], None]] = {}
    exec(compile(ENGINE, "/torch/autograd/graph.py", "exec"), engine)  # noqa: S102
    released = threading.Lock()

    def run(event: threading.Event, hook: Callable[[], object] | None) -> None:
        released.acquire()
        if hook is not None:
            # As threads that torch starts: the first function that Python sees is the hook.
            _thread.start_new_thread(hook, ())
        engine["_engine_run_backward"](_blocked(event))
        released.release()

    def compute() -> None:
        while released.locked():
            time.sleep(0.01)

    # Not those of pytest's workers, which are not of the threading module either.
    see, others = sys._current_frames, sys._current_frames().keys() - {threading.get_ident()}
    own = patch.object(
        sys, "_current_frames", lambda: {i: f for i, f in see().items() if i not in others}
    )
    with own, patch.object(torch.cuda, "is_initialized", lambda: True):
        assert _look_at(lambda event: run(event, None)) == ({True}, 1)
        assert _look_at(lambda event: run(event, compute)) == ({False}, 1)
