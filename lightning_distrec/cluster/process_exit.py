"""Destroys the process group before the interpreter ends.

A gloo thread that drops its last Python object while the interpreter is finalizing aborts the process ("terminate
called without an active exception"): after a run that succeeded, or after the message of one that failed. So at exit:
release what holds requests, collect garbage, wait for the other ranks for a bounded time, destroy the group.
"""

import atexit
import contextlib
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist

from lightning_distrec._compat.torch import abort_process_groups, default_store
from lightning_distrec.cluster.consensus import forget_consensus

FAREWELL_SECONDS = 10.0
FAREWELL = "farewell"

_releases: list[WeakMethod[Callable[[], None]]] = []
_failed = False
_watched: Callable[[bool], AbstractContextManager[Any]] = nullcontext
"""A context around leaving; its argument: whether a run has failed."""


def leave_at_exit(release: Callable[[], None], watched: Callable[[bool], AbstractContextManager[Any]]) -> None:
    """Register the destruction of the process group at exit.

    release: a bound method that drops its object's references to sharded modules; the object is not kept alive for it.
    watched: returns a context around leaving, from whether a run has failed.
    """
    global _watched
    if not _releases:
        atexit.register(leave)
    _releases.append(WeakMethod(release))
    _watched = watched


def note_failure() -> None:
    """Remember that a run failed: other ranks may be gone, so that the exit must not wait for them."""
    global _failed
    _failed = True


def leave() -> None:
    """Destroy the process group, once all ranks are here or some seconds have passed."""
    # sys.last_value: set by the interpreter when an exception reached the top of the script.
    has_failed = _failed or hasattr(sys, "last_value")
    with _watched(has_failed):
        _leave(has_failed)


def _leave(has_failed: bool) -> None:
    if has_failed and dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        # First: freeing a GPU's memory waits for kernels, which wait for ranks that are gone. Not run on a GPU yet.
        with contextlib.suppress(Exception):
            abort_process_groups()
    for weak in _releases:
        if (release := weak()) is not None:
            release()
    forget_consensus()
    gc.collect()
    if not dist.is_available() or not dist.is_initialized():
        return
    if not has_failed and dist.get_backend() == "gloo" and dist.get_world_size() > 1:
        _wait_for_all(default_store(), dist.get_world_size())
    dist.destroy_process_group()


def _wait_for_all(store: dist.Store, num_ranks: int) -> None:
    """Wait for all ranks, for a bounded time: one may be gone, or may wait for this one in a collective.

    By the store, and not by a barrier: a rank in another collective would match the barrier's messages with its own.
    """
    deadline = time.monotonic() + FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # rank 0, whose process holds the store, has seen all ranks and ended
        here = store.add(FAREWELL, 1)
        while here < num_ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            here = store.add(FAREWELL, 0)
