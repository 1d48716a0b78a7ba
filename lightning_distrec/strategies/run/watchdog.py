"""Runs under the watchdog: each reports its begin and end, and a failure that another rank caused names that rank."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_distrec._compat.torch import collective_counts
from lightning_distrec.cluster.introduction import LOOPBACK, listen_at
from lightning_distrec.cluster.watchdog.watchdog import Watchdog

_watchdog: Watchdog | None = None
_watched_trainer: Trainer | None = None


def start_watchdog(
    rank: int, host: str, port: int, token: str, limit_seconds: float, nodes: Sequence[str], one_node: bool
) -> int:
    """Watch over the ranks until the process ends, from the moment that this one and rank 0 know of each other.

    host: of rank 0. port: of rank 0's watchdog, 0 on rank 0. token: known to this job only. limit_seconds: 0 disables.
    one_node: whether all ranks are on one node. Return rank 0's port.
    """
    global _watchdog
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None
    if not limit_seconds:
        return port
    listener = None
    if rank == 0:
        listener = listen_at(host, 0, one_node)
        host, port = listener.getsockname()[:2]
        host = LOOPBACK if host in ("0.0.0.0", "::") else host  # all interfaces
    _watchdog = Watchdog(rank, host, port, token, listener, limit_seconds, nodes)
    if _watched_trainer is not None:
        _begin(_watchdog, _watched_trainer)
    return port


@contextmanager
def watched(trainer: Trainer | None, all_leave: Callable[[], bool]) -> Iterator[None]:
    """Around a run of the trainer. all_leave: whether a SystemExit is one that all ranks have agreed on.

    Raises RankError, from what torch has raised: an exchange failed because of another rank, which is named.
    """
    global _watched_trainer
    if _watchdog is not None and trainer is not None:
        _begin(_watchdog, trainer)
    _watched_trainer = trainer
    try:
        yield
    except BaseException as failure:
        if _watchdog is None:
            raise
        if isinstance(failure, SystemExit) and all_leave():
            _watchdog.end_run()
            raise
        if (reason := _watchdog.explain(failure)) is not None:
            raise reason from failure
        raise
    finally:
        _watched_trainer = None
    if _watchdog is not None:
        _watchdog.end_run()


@contextmanager
def leaving(has_failed: bool) -> Iterator[None]:
    """Around what may wait for other ranks after a run. has_failed: the run has; the wait is limited then."""
    watchdog = _watchdog if has_failed else None
    if watchdog is not None:
        watchdog.leave(True)
    try:
        yield
    finally:
        if watchdog is not None:
            watchdog.leave(False)


def _begin(watchdog: Watchdog, trainer: Trainer) -> None:
    reference = weakref.ref(trainer)  # the watchdog stays, and a trainer holds shards
    watchdog.start_run(lambda: "" if (running := reference()) is None else progress_of(running))


def progress_of(trainer: Trainer) -> str:
    """Return how far a run is: stage, batch, and how many exchanges it has begun in each process group.

    Ranks that have parted ways differ by these, where not by the line that they are at.
    """
    state = trainer.state
    if state.stage is None:
        return f"{state.fn}"
    validation = trainer.fit_loop.epoch_loop.val_loop if state.fn == TrainerFn.FITTING else trainer.validate_loop
    loops: dict[str, Any] = {
        "train": trainer.fit_loop.epoch_loop,
        "sanity_check": validation,
        "validate": validation,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    batch = loops[state.stage.value].batch_progress.current.ready
    return f"{state.stage.value} batch {batch}, exchanges {'/'.join(map(str, collective_counts()))}"
