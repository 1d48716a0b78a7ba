"""Where a rank's main thread is, whether it waits for others there, and what it says of failures."""

import _thread
import contextlib
import functools
import gc
import json
import mmap
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from lightning_distrec.cluster.places import (
    find_location,
    find_place,
    is_network_failure,
    is_waiting,
    locate_thread,
)
from lightning_distrec.errors import RankError
from tests.support.limits import LIMIT_SECONDS


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
    assert location.startswith("test_places.py:")
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
    limit = time.monotonic() + LIMIT_SECONDS
    while sys._current_frames()[cast(int, thread.ident)].f_code is not enter.__code__:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert sys._current_frames()[cast(int, thread.ident)].f_lineno is None
    assert not is_waiting(cast(int, thread.ident))
    lock.release()
    thread.join()


def _look_at(run: Callable[[threading.Event], object]) -> tuple[set[bool], int]:
    """Run something that ends with an event, and look at it. Return whether it waits, and at how
    many places it was.

    This thread runs it, and another one looks.
    """
    thread_id = threading.get_ident()
    waits: list[bool] = []
    places: list[int] = []
    event = threading.Event()

    def look() -> None:
        # Until it has come to where it stays; what computes is never at one place.
        for _ in range(10):
            place = find_place(thread_id)
            time.sleep(0.1)
            if find_place(thread_id) == place:
                break
        for _ in range(8):
            time.sleep(0.1)
            waits.append(is_waiting(thread_id))
            places.append(find_place(thread_id))
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

    def wait(event: threading.Event) -> None:
        end = threading.Thread(target=lambda: event.wait() and store.set("end", ""), daemon=True)
        end.start()
        store.wait(["end"], timedelta(seconds=LIMIT_SECONDS))

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
    thread_id = threading.get_ident()

    def places(work: Callable[[], object]) -> int:
        return len({(work(), find_place(thread_id))[1] for _ in range(2)})

    def compute(seconds: float = 1) -> None:
        began = time.thread_time()
        while time.thread_time() < began + seconds:
            pass

    def copy() -> None:
        mmap.mmap(-1, 2000 * mmap.PAGESIZE).write(bytes(2000 * mmap.PAGESIZE))

    assert places(compute) == 2
    assert places(int) == 1
    with patch.object(torch.cuda, "is_initialized", lambda: True):
        assert places(lambda: compute(0.2)) == 1, "a wait for a GPU takes a processor"
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


def test_who_looks_at_a_thread_keeps_nothing_that_it_holds() -> None:
    held: list[weakref.ref[threading.Event]] = []
    looked, holds = threading.Event(), threading.Event()

    def hold() -> None:
        value = threading.Event()
        held.append(weakref.ref(value))
        holds.set()
        looked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    gc.disable()
    try:
        for look in (is_waiting, find_place, locate_thread):
            look(thread.ident or 0)
        looked.set()
        thread.join()
        assert held[0]() is None
    finally:
        gc.enable()
