"""A rank's side of the watchdog: it reports when runs start, end and fail, and asks why a collective failed."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from torch.distributed import DistError

from lightning_distrec.cluster.watchdog.hub import Settings
from lightning_distrec.cluster.watchdog.monitor import COMMAND
from lightning_distrec.errors import RankError

STALL_SECONDS = 60.0
ANSWER_SECONDS = 5.0
MAX_FAILURE_LENGTH = 500
MAX_RESTARTS = 5
"""A process that is killed more often than this is not started again."""
NETWORK_ERRORS = (
    "gloo",
    "nccl",
    "closed by peer",
    "pair closure",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "failed to recv",
)
"""Words in the plain RuntimeErrors that torch raises when another rank is gone or does not arrive."""
NOT_USER_CODE = ("site-packages", "dist-packages", str(Path(os.__file__).parent), str(Path(__file__).parents[2]))

RULE = (
    "All ranks must make the same calls: lookups of sharded tables are collective, as all_gather and "
    "self.log(sync_dist=True) are, and must not be under a condition that differs between ranks, such as "
    "trainer.is_global_zero."
)
"""What a user may not know whose ranks have parted ways."""


class Watchdog:
    """Watches over all ranks, by a small process for each of them; see monitor.py.

    All ranks make one. host, port: of rank 0's process. token: what the processes of this job know of each other by.
    listener: where rank 0's process listens, on rank 0. silence_seconds: a rank that is stopped or silent for this time
    makes the others abort. stall_seconds: after this time without progress on any rank, a line says where they are.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        token: str,
        listener: socket.socket | None,
        silence_seconds: float,
        nodes: Sequence[str] = (),
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._started = self._questions = self._restarts = 0
        self._has_answer = threading.Event()
        self._answer: dict[str, str] = {}
        self._progress: Callable[[], str] = str
        self._main = threading.main_thread().ident or 0
        self._listener = listener
        fd = None if listener is None else listener.fileno()
        pid = os.getpid()
        self._settings = Settings(rank, pid, list(nodes), host, port, fd, token, silence_seconds, stall_seconds)
        self._state: dict[str, object] = {}
        self._sending = threading.Lock()
        self._process = self._start_process()
        threading.Thread(target=self._receive, name="watchdog", daemon=True).start()

    def _start_process(self) -> "subprocess.Popen[bytes]":
        process_ = subprocess.Popen(
            [*COMMAND, json.dumps(asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=() if self._listener is None else (self._listener.fileno(),),
        )
        os.set_blocking(process_.stdin.fileno(), False)  # type: ignore[union-attr]  # a pipe, never None
        return process_

    def start_run(self, progress: Callable[[], str]) -> None:
        """Report that a run starts. progress: returns how far the run is; called by another thread."""
        self._progress = progress
        self._started += 1
        self._send(started=self._started)

    def end_run(self) -> None:
        """Report that the run has ended."""
        self._send(ended=self._started)

    def explain(self, failure: BaseException) -> RankError | None:
        """Report that the run has failed. Return why, if another rank is the cause; if not, the others are informed."""
        reason = None
        if is_of_network(failure):
            self._questions += 1
            self._send(questions=self._questions)
            if self._has_answer.wait(ANSWER_SECONDS):
                verdict, locations = self._answer["verdict"], self._answer["locations"]
                reason = f"{verdict}." if verdict else f"a collective failed. Where the ranks are: {locations}. {RULE}"
            self._has_answer.clear()
        is_repeated = reason is not None or isinstance(failure, RankError)
        text = "" if is_repeated else f"{type(failure).__name__}: {failure}"[:MAX_FAILURE_LENGTH]
        self._send(failed=self._started, failure=text)
        return None if reason is None else RankError(reason)

    def leave(self, is_leaving: bool) -> None:
        """Report that this rank, whose run has failed, begins or ends giving up what may wait for other ranks."""
        self._send(is_leaving=is_leaving)

    def close(self) -> None:
        """Stop watching; this process goes on."""
        self._send(is_closed=True)

    def _send(self, **changes: object) -> None:
        with self._sending:
            self._state |= changes
            self._write(changes)

    def _write(self, changes: dict[str, object]) -> None:
        with contextlib.suppress(OSError, ValueError):  # a rank must not fail because its watchdog does
            self._process.stdin.write(json.dumps(changes).encode() + b"\n")  # type: ignore[union-attr]

    def _receive(self) -> None:
        while True:
            for line in self._process.stdout:  # type: ignore[union-attr]
                message = json.loads(line)
                if "survey" in message:
                    self._send(location=self._location(), progress=self._progress())
                else:
                    self._answer = message
                    self._has_answer.set()
            if not self._restart():
                return

    def _restart(self) -> bool:
        """Start another process where this one was killed; return whether there is one.

        The others would take this rank for silent, and end the job. The new process gets the whole state, and rank 0's
        goes on listening at the socket of the old one, where the others connect again.
        """
        status = self._process.wait()
        if self._state.get("is_closed") or sys.is_finalizing():
            return False
        self._restarts += 1
        end = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        is_last = self._restarts > MAX_RESTARTS
        reaction = "It is not watched any more" if is_last else "Another one is started"
        rank = self._settings.rank
        print(f"[rank: {rank}] The process that watches over this rank ended {end}. {reaction}.", flush=True)
        if is_last:
            return False
        with self._sending:
            self._process = self._start_process()
            self._write(self._state)
        return True

    def _location(self) -> str:
        frames = sys._current_frames()  # noqa: SLF001  documented in spite of its name
        return location_of(frames[self._main]) if self._main in frames else ""


def is_of_network(failure: BaseException) -> bool:
    """Whether another rank may have caused an exception. torch and gloo have no classes for that, only texts."""
    if isinstance(failure, RankError):
        return False
    words = str(failure).lower()
    return isinstance(failure, DistError | ConnectionError) or (
        isinstance(failure, RuntimeError) and any(word in words for word in NETWORK_ERRORS)
    )


def location_of(frame: FrameType) -> str:
    """Return where a thread is: the innermost line of the user's code, and what it has called there."""
    inner = frame.f_code.co_name
    caller: FrameType | None = frame
    while caller is not None and (
        caller.f_code.co_filename.startswith("<") or any(part in caller.f_code.co_filename for part in NOT_USER_CODE)
    ):
        caller = caller.f_back
    user = frame if caller is None else caller
    line = f"{os.path.basename(user.f_code.co_filename)}:{user.f_lineno} in {user.f_code.co_name}"
    return line if user is frame else f"{line} ({inner})"
