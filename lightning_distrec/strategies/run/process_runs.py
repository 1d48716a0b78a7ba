"""The runs of this process, with their heartbeat, and what follows the last of them: leaving the
process group at exit.

A gloo thread that drops its last Python object while the interpreter is finalizing aborts the
process ("terminate called without an active exception"). So at exit: release what holds requests,
collect garbage, wait for the other ranks for a bounded time, destroy the group.
"""

import atexit
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_only

from lightning_distrec._compat.torch import abort_process_groups, collective_counts
from lightning_distrec.cluster.consensus import forget_consensus
from lightning_distrec.cluster.heartbeat import Heartbeat, start_heartbeat
from lightning_distrec.cluster.host_resources import listen_at
from lightning_distrec.cluster.launched import MeetingPoint
from lightning_distrec.cluster.verdicts import Judge
from lightning_distrec.errors import ConfigError, RankError
from lightning_distrec.strategies.run.calls_outside import (
    CallsOutside,
    destroy_after_all,
    wait_for_all,
)


@dataclass(frozen=True)
class Waits:
    """How long ranks wait for each other. Raises ConfigError: a time is out of range."""

    timeout: timedelta
    """In an exchange."""
    start_seconds: float
    """At the start, until all have arrived."""
    watchdog_seconds: float
    """For one that is silent."""
    deadlock_seconds: float
    """For each other, in different exchanges."""

    def __post_init__(self) -> None:
        if not self.start_seconds > 0:
            raise ConfigError(
                f"start_seconds={self.start_seconds}: must be a number of seconds above 0."
            )
        for name in ("watchdog_seconds", "deadlock_seconds"):
            seconds = getattr(self, name)
            if seconds < 0:
                raise ConfigError(f"{name}={seconds}: must be at least 0, which disables it.")


FAREWELL_SECONDS = 10.0


class ProcessRuns:
    """What lives from the first rendezvous until the process ends, over all Trainers: they share a
    process group."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.calls_outside = CallsOutside()
        self.has_failed = False
        """Whether a run has failed: other ranks may be gone, so that the exit must not wait for
        them."""
        self._trainer: Trainer | None = None
        self._releases: list[weakref.WeakMethod[Callable[[], None]]] = []

    def start_heartbeat(
        self, rank: int, point: MeetingPoint, nodes: list[str], host: str, port: int, waits: Waits
    ) -> int:
        """Watch over the ranks from the moment that this one and rank 0 know of each other. Return
        the port at which rank 0 listens for that.

        nodes: the node of each rank by name, "" where that is not known. host, port: of rank 0;
        the port is 0 on rank 0.
        """
        # It is connected to rank 0 of an earlier meeting.
        if self.heartbeat is not None:
            self.heartbeat.report(is_closed=True)
            self.heartbeat = None
        if not waits.watchdog_seconds:
            return port
        listener = None
        if rank == 0:
            listener = listen_at(host, 0, point.one_node)
            port = listener.getsockname()[1]
        judge = Judge(nodes, waits.watchdog_seconds, waits.deadlock_seconds)
        self.heartbeat = start_heartbeat(rank, judge, point.identity, (host, port), listener)
        # The run began before the meeting, when there was no heartbeat to report it to.
        self._start_run()
        return port

    def note_writing(self, is_writing: bool) -> None:
        """Note whether this rank writes a checkpoint in the background: it is not ended for
        another's failure then."""
        if self.heartbeat is not None:
            self.heartbeat.is_writing = is_writing

    @contextmanager
    def run(
        self, trainer: Trainer | None, all_leave: Callable[[], bool], timeout_seconds: float
    ) -> Iterator[None]:
        """Around a run of the trainer. all_leave: whether a SystemExit is one that all ranks have
        agreed on.

        Raises RankError: another rank has failed in the run, and is named; or from what torch has
        raised: an exchange failed because of another rank.
        """
        self._trainer = trainer
        self._start_run()
        try:
            yield
            if self.heartbeat is not None and dist.is_initialized():
                self._meet_at_end(self.heartbeat, timeout_seconds)
        # Also for KeyboardInterrupt and SystemExit: the other ranks wait for this one all the same.
        except BaseException as failure:
            report_causes_only()
            if self.heartbeat is None:
                raise
            # No failure: a signal has stopped all ranks, which end by themselves.
            if isinstance(failure, SystemExit) and all_leave():
                self.heartbeat.end_run()
                raise
            reason = self.heartbeat.explain(failure)
            if reason is not None:
                raise reason from failure
            raise
        finally:
            self._trainer = None
        if self.heartbeat is not None:
            self.heartbeat.end_run()

    @contextmanager
    def leaving(self, has_failed: bool) -> Iterator[None]:
        """Around what may wait for other ranks after a run. has_failed: the run has; the wait is
        limited then."""
        heartbeat = self.heartbeat if has_failed else None
        if heartbeat is not None:
            heartbeat.report(is_leaving=True)
        try:
            yield
        finally:
            if heartbeat is not None:
                heartbeat.report(is_leaving=False)

    def leave_at_exit(self, release: Callable[[], None]) -> None:
        """Register the destruction of the process group at exit.

        release: a bound method that drops its object's references to sharded modules; the object is
        not kept alive.
        """
        if not self._releases:
            atexit.register(self.leave)
        self._releases.append(weakref.WeakMethod(release))

    def leave(self) -> None:
        """Destroy the process group, once all ranks are here or some seconds have passed."""
        # sys.last_value: set by the interpreter when an exception reached the top of the script.
        has_failed = self.has_failed or hasattr(sys, "last_value")
        with self.leaving(has_failed):
            if (
                has_failed
                and dist.is_available()
                and dist.is_initialized()
                and "nccl" in dist.get_backend()
            ):
                # First: freeing a GPU's memory waits for kernels, which wait for ranks that are
                # gone. Not run on a GPU.
                with suppress(Exception):
                    abort_process_groups()
            for reference in self._releases:
                release = reference()
                if release is not None:
                    release()
            # What holds requests to gloo is often part of a reference cycle.
            forget_consensus()
            gc.collect()
            if dist.is_available() and dist.is_initialized():
                if has_failed:
                    dist.destroy_process_group()
                else:
                    destroy_after_all(FAREWELL_SECONDS)

    def _meet_at_end(self, heartbeat: Heartbeat, timeout_seconds: float) -> None:
        """Collective. Wait for the other ranks to end the run, up to the timeout. Raises RankError:
        one has failed.

        Otherwise nobody would miss a rank that fails after its last exchange: the others would end
        well.
        """
        try:
            wait_for_all(heartbeat.begin_end(), timeout_seconds, heartbeat.look_for_failures)
        except RankError:
            raise
        # rank 0, whose process holds the store, has seen all ranks and ended, or died
        except RuntimeError as failure:
            reason = heartbeat.ask().running
            if reason:
                raise RankError(f"{reason}.") from failure

    def _start_run(self) -> None:
        if self.heartbeat is not None and self._trainer is not None:
            # The heartbeat stays, and a trainer holds shards.
            reference = weakref.ref(self._trainer)

            def progress() -> str:
                trainer = reference()
                return "" if trainer is None else describe_progress(trainer)

            self.heartbeat.start_run(progress)


PROCESS = ProcessRuns()


def report_causes_only() -> None:
    """Let ranks that end because of another one print that in a line: its own traceback, or rank
    0's, shows the rest.

    Otherwise a launcher's log has as many long tracebacks as ranks, and the cause is one of them.
    """
    report = sys.excepthook
    rank = getattr(rank_zero_only, "rank", 0)
    if getattr(report, "__module__", "") == __name__ or rank == 0:
        return

    def report_in_one_line(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RankError):
            print(
                rank_prefixed_message(f"{kind.__name__}: {error}", rank),
                file=sys.stderr,
                flush=True,
            )
        else:
            report(kind, error, trace)

    sys.excepthook = report_in_one_line


def describe_progress(trainer: Trainer) -> str:
    """Return how far a run is: stage, batch, and how many exchanges it has begun in each process
    group.

    Ranks that have parted ways differ by these, where not by the line that they are at.
    """
    state = trainer.state
    if state.stage is None:
        return f"{state.fn}"
    validation = (
        trainer.fit_loop.epoch_loop.val_loop
        if state.fn == TrainerFn.FITTING
        else trainer.validate_loop
    )
    loops: dict[str, Any] = {
        "train": trainer.fit_loop.epoch_loop,
        "sanity_check": validation,
        "validate": validation,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    # `ready` counts a batch as soon as its turn comes, before its hooks and its step run.
    batch = loops[state.stage.value].batch_progress.current.ready
    return f"{state.stage.value} batch {batch}, exchanges {'/'.join(map(str, collective_counts()))}"
