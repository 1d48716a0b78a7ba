"""Leaves the process group before the interpreter ends.

A gloo worker thread that drops its last Python object while the interpreter is finalising aborts the process
("terminate called without an active exception"), after a run that was fine, or on top of the message of one that was
not. So at exit: let go of what holds requests, collect, wait for the others for a bounded time, leave the group.
"""

import atexit
import contextlib
import gc
import sys
import time
from collections.abc import Callable
from weakref import WeakMethod

import torch.distributed as dist

from lightning_distrec._compat.torch import default_store
from lightning_distrec.cluster.consensus import forget_consensus

FAREWELL_SECONDS = 10.0
FAREWELL = "farewell"

_releases: list[WeakMethod[Callable[[], None]]] = []
_failed = False


def leave_at_exit(release: Callable[[], None]) -> None:
    """Register the leaving of the process group.

    release: a bound method that drops its object's references to sharded modules; the object is not kept alive for it.
    """
    if not _releases:
        atexit.register(_leave)
    _releases.append(WeakMethod(release))


def note_failure() -> None:
    """Remember that a run failed: its peers may be gone, so leaving must not wait for them."""
    global _failed
    _failed = True


def _leave() -> None:
    for weak in _releases:
        if (release := weak()) is not None:
            release()
    forget_consensus()
    gc.collect()
    if not dist.is_available() or not dist.is_initialized():
        return
    # sys.last_value: set by the interpreter when an exception reached the top of the script.
    if not (_failed or hasattr(sys, "last_value")) and dist.get_backend() == "gloo" and dist.get_world_size() > 1:
        _wait_for_all(default_store(), dist.get_world_size())
    dist.destroy_process_group()


def _wait_for_all(store: dist.Store, num_ranks: int) -> None:
    """Wait until all ranks are here, for a bounded time: one may have left, or may need this one for something else.

    By the store, not by a barrier of the group, which a rank that is in another exchange would take for its own.
    """
    deadline = time.monotonic() + FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # rank 0, whose process holds the store, has seen all and left
        here = store.add(FAREWELL, 1)
        while here < num_ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            here = store.add(FAREWELL, 0)
