"""A rank's side of the watchdog: it reports when runs start, end and fail, and asks why a
collective failed."""

import contextlib
import json
import linecache
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import DistError

from lightning_distrec.cluster.door import encode_fields
from lightning_distrec.cluster.watchdog_messages import RULE, Settings
from lightning_distrec.cluster.watchdog_monitor import COMMAND, is_stopped
from lightning_distrec.errors import RankError

ANSWER_SECONDS = 10.0
"""How long a rank waits for the reason of a failed collective; after that, it gets all ranks'
locations.

With 32 ranks on two cores the reason takes more than 3 s to come.
"""
ASK_AFTER_SECONDS = 1.0
"""When a rank that has ended its run begins to ask why others have not."""
MAX_STARTS = 6
"""A process that was killed is started again, up to this number in all."""
CHECKS = 4
"""How often the process is looked at within `silence_seconds`; it is stopped if it is so twice, and
then replaced."""
NETWORK_ERROR = re.compile(
    "gloo|nccl|closed by peer|pair closure|connection reset|connection refused|broken pipe|timed "
    "out|failed to recv"
)
"""Words in the plain RuntimeErrors that torch raises when another rank is gone or does not
arrive."""
# The last is this package, which an editable install keeps outside of site-packages.
NOT_USER_CODE = (
    "<",
    "site-packages",
    "dist-packages",
    str(Path(os.__file__).parent),
    str(Path(__file__).parents[1]),
)
# Files in which a thread waits for other ranks, or starts what does: `backward`. Not those of
# checkpoints, where it waits for a disk.
EXCHANGES = re.compile(
    r"/(torch/(distributed/(?!checkpoint)|nn/parallel/dist|autograd/(?!prof))|torchrec/distributed/)"
)
# Waits known by what lines end with: those for a GPU take a whole processor, as work does.
ARGUMENTS = r"\(([^()]|\([^()]*\))*\)[])}:,]*$"
WAIT = re.compile(r"\.wait" + ARGUMENTS)
WAIT_FOR_GPU = re.compile(r"\.(item|cpu|tolist|to|nonzero|\w*synchronize)" + ARGUMENTS)
PAGES_PER_PLACE = 1000
"""A thread that has taken this many pages of memory is at another place: it copies. One that spins
takes few."""


class Watchdog:
    """Watches over all ranks, by a small process for each of them; see watchdog_monitor.py. All
    ranks make one.

    listener: where rank 0's process listens, on rank 0; its file descriptor is that of the
    settings.
    """

    def __init__(self, settings: Settings, listener: socket.socket | None) -> None:
        self._settings, self._listener = settings, listener
        self._has_verdict = threading.Event()
        self._answer: dict[str, str] = {}
        self._progress: Callable[[], str] = str
        self._failure_location = ""
        self._main = threading.main_thread().ident or 0
        self._state: dict[str, object] = {"started": 0}
        # Both the main thread and the one that receives write lines.
        self._sending = threading.Lock()
        self._process = self._start_process()
        threading.Thread(target=self._receive, name="watchdog", daemon=True).start()

    def _start_process(self) -> "subprocess.Popen[bytes]":
        monitor = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # The listener has the same number in the child, which the settings name; others are
            # closed there.
            pass_fds=() if self._listener is None else (self._listener.fileno(),),
        )
        with contextlib.suppress(OSError):  # it has been killed already
            monitor.stdin.write(encode_fields(asdict(self._settings)) + encode_fields(self._state))  # type: ignore[union-attr]
        # A monitor that is stopped must not stop its rank at a full pipe; the next line has the
        # whole state.
        os.set_blocking(monitor.stdin.fileno(), False)  # type: ignore[union-attr]
        return monitor

    def start_run(self, progress: Callable[[], str]) -> None:
        """Report that a run starts. progress: returns how far the run is; called by another
        thread."""
        self._progress, self._failure_location = progress, ""
        self.send(started=self._state["started"] + 1)  # type: ignore[operator]

    def end_run(self) -> None:
        """Report that the run has ended."""
        self.send(ended=self._state["started"], is_asking=False)

    def begin_end(self) -> str:
        """Note that this rank waits for the others to end the run, too. Return where, which is the
        same on all."""
        self._progress, self._answer = _wait_at_end, {}
        return f"end of run {self._state['started']}"

    def look_for_failures(self, seconds: float, _: int) -> None:
        """Raise RankError: a rank has failed, or is gone, or waits for this one. seconds: at the
        end so far."""
        # Ranks seldom end at the same moment, and all ranks answer to one that asks.
        if seconds > ASK_AFTER_SECONDS and not self._state.get("is_asking"):
            self.send(is_asking=True)
        if verdict := self._answer.get("verdict"):
            raise RankError(f"{verdict}.")

    def ask(self) -> dict[str, str]:
        """Return the hub's verdict, and where the ranks are; without a verdict after some
        seconds."""
        self._answer = {}
        self._has_verdict.clear()
        self.send(is_asking=True, location=self._failure_location)
        self._has_verdict.wait(ANSWER_SECONDS)
        return self._answer

    def explain(self, failure: BaseException) -> RankError | None:
        """Report that the run has failed. Return why, if another rank is the cause; if not, the
        others are informed."""
        # The stack is unwound by now; the traceback still has the line that failed, but not the
        # frames around this one.
        frames = [*traceback.walk_tb(failure.__traceback__)][::-1]
        self._failure_location = find_location([*frames, *traceback.walk_stack(None)])
        reason = None
        if is_network_failure(failure) and (answer := self.ask()):
            text = str(failure).strip().partition("\n")[0]
            places = (
                f"a collective failed ({text}). Where the ranks are: {answer['locations']}. {RULE}"
            )
            reason = f"{answer['verdict']}." if answer["verdict"] else places
        # The hub names a rank with a failure of its own as the cause, and this one only follows
        # from another's.
        is_repeated = reason is not None or isinstance(failure, RankError)
        text = "" if is_repeated else f"{type(failure).__name__}: {failure}"[:500]
        self.send(failed=self._state["started"], failure=text, is_asking=False)
        return None if reason is None else RankError(reason)

    def send(self, **changes: object) -> None:
        """Send changes of the rank's state to its monitor, with all else: another process may have
        been started since.

        is_leaving: its run has failed, and it gives up what may wait for others. is_closed: it is
        not watched any more.
        """
        # a rank must not fail because its watchdog does
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._state |= changes
            self._process.stdin.write(encode_fields(self._state))  # type: ignore[union-attr]

    def end_stopped(self) -> bool:
        """End the process where it is stopped, which it would be for ever, and return whether it
        was."""
        if was_stopped := is_stopped(self._process.pid):
            self._process.kill()
        return was_stopped

    def _receive(self) -> None:
        """Answer each message with the rank's location, and start another process where one was
        killed or stopped.

        The others would take this rank for silent, and end the job. Rank 0's new process listens at
        the socket of the old one, where the others connect again.
        """
        for _ in range(MAX_STARTS):
            for line in self._lines():
                with contextlib.suppress(ValueError):  # a line that did not fit into the pipe
                    self._answer = json.loads(line)
                    if self._answer["verdict"]:
                        self._has_verdict.set()
                # By this thread: the main one may be stuck in a collective, which is what the hub
                # wants to know.
                is_waiting, progress = self._is_waiting(), self._progress()
                # Where a run ends, ranks ask the store again and again.
                place = (
                    self._place(progress)
                    if is_waiting and self._progress is not _wait_at_end
                    else 0
                )
                self.send(
                    location=self._find_location(),
                    progress=progress,
                    is_waiting=is_waiting,
                    place=place,
                )
            status = self._process.wait()
            # It ended as requested, or along with the interpreter: neither is a reason for another
            # one.
            if self._state.get("is_closed") or sys.is_finalizing():
                return
            self._print(
                f"The process that watches over this rank ended with status {status}. "
                "Another one is started."
            )
            self._process = self._start_process()

    def _lines(self) -> Iterator[bytes]:
        """Yield what the process sends, until it ends. One that is stopped is ended."""
        poll, was_stopped = select.poll(), False
        poll.register(self._process.stdout, select.POLLIN)  # type: ignore[arg-type]
        while True:
            if poll.poll(1000 * self._settings.silence_seconds / CHECKS):
                if not (line := self._process.stdout.readline()):  # type: ignore[union-attr]
                    return
                was_stopped = False
                yield line
            # Twice, since both may have been stopped, and the rank may be the first to go on.
            elif was_stopped and self.end_stopped():
                self._print(
                    "The process that watches over this rank is stopped (by SIGSTOP?), "
                    "and is ended."
                )
                return
            else:
                was_stopped = is_stopped(self._process.pid)

    def _print(self, message: str) -> None:
        print(f"[rank: {self._settings.rank}] {message}", flush=True)

    def _is_waiting(self) -> bool:
        """Whether this rank waits for others, or for a GPU that may, as far as Python sees."""
        if self._progress is _wait_at_end:
            return True
        frames = sys._current_frames()  # noqa: SLF001
        if (main := frames.pop(self._main, None)) is None:
            return False
        own = []
        # On GPUs it runs on threads that torch starts: hooks compute there, and what is compiled on
        # first use.
        if main.f_code.co_name == "_engine_run_backward":
            stacks = [[*traceback.walk_stack(frame)] for frame in frames.values()]
            own = [
                stack[0][0]
                for stack in stacks
                if stack[-1][0].f_code.co_filename != threading.__file__
            ]
        return all(map(is_wait, own or [main]))

    def _place(self, progress: str) -> int:
        """Return a number that stays while the main thread stays in one call, and computes and
        copies nothing."""
        stack = traceback.walk_stack(sys._current_frames().get(self._main))  # noqa: SLF001
        return hash((
            progress,
            *count_work(self._main),
            *((id(frame.f_code), frame.f_lasti) for frame, _ in stack),
        ))

    def _find_location(self) -> str:
        # After a failure the main thread is in handlers of the exception, far from the line that
        # failed.
        if self._failure_location:
            return self._failure_location
        frames = sys._current_frames()  # noqa: SLF001  documented in spite of its name
        return (
            find_location(traceback.walk_stack(frames[self._main])) if self._main in frames else ""
        )


def _wait_at_end() -> str:
    return "at the end of its run"


def is_wait(frame: FrameType) -> bool:
    """Whether a thread that is in a frame waits in a call of C that waits for ranks or GPUs, or may
    do so."""
    # What calls an operation of torch by its name, such as a collective's wait_tensor.
    while frame.f_back is not None and frame.f_code.co_filename.endswith("/torch/_ops.py"):
        frame = frame.f_back
    # A frame has no line while it is entered.
    if frame.f_lineno is None:
        return False
    # Waits of exchanges call into C; others, of threads and processes, are functions of Python with
    # other lines.
    file = frame.f_code.co_filename
    line = linecache.getline(file, frame.f_lineno).rstrip()
    waits_for_gpu = torch.cuda.is_initialized() and WAIT_FOR_GPU.search(line)
    return bool(WAIT.search(line) or waits_for_gpu or EXCHANGES.search(file))


def count_work(thread: int) -> tuple[int, int]:
    """Return counts that grow while a process computes on GPUs, or a thread copies; without GPUs,
    while it computes."""
    if not torch.cuda.is_initialized():
        return int(time.clock_gettime(time.pthread_getcpuclockid(thread))), 0
    # Waits for a GPU take a processor, too. What computes there takes memory there.
    stats = map(torch.cuda.memory_stats, range(torch.cuda.device_count()))
    # Source: man 5 proc, from minflt to cmajflt.
    path = f"/proc/self/task/{threading.main_thread().native_id}/stat"
    pages = sum(map(int, Path(path).read_text().rpartition(")")[2].split()[7:11]))
    return sum(counts["allocation.all.allocated"] for counts in stats), pages // PAGES_PER_PLACE


def is_network_failure(failure: BaseException) -> bool:
    """Whether another rank may have caused an exception. torch and gloo have no classes for that,
    only texts."""
    # It is a RuntimeError with its reason already, whose text may hold some of these words.
    if isinstance(failure, RankError):
        return False
    if isinstance(failure, DistError | ConnectionError):
        return True
    return (
        isinstance(failure, RuntimeError) and NETWORK_ERROR.search(str(failure).lower()) is not None
    )


def find_location(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return where a thread is: the innermost line of the user's code, and what it has called
    there.

    frames: with their lines, innermost first, as `traceback.walk_stack` returns them.
    """
    codes = [(frame.f_code, line) for frame, line in frames]
    outside = [
        place for place in codes if not any(part in place[0].co_filename for part in NOT_USER_CODE)
    ]
    (user, line), (innermost, _) = (outside or codes)[0], codes[0]
    location = f"{os.path.basename(user.co_filename)}:{line} in {user.co_name}"
    return location if user is innermost else f"{location} ({innermost.co_name})"
