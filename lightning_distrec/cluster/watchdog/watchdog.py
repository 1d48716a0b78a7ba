"""A rank's side of the watch over all: when it begins and ends to need the others, and why they do not answer."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, Store

from lightning_distrec.cluster.watchdog import watchdog_process
from lightning_distrec.cluster.watchdog.watchdog_process import Setting
from lightning_distrec.errors import RankError

KEY = "watchdog"
STILL_SECONDS = 60.0
ANSWER_SECONDS = 5.0
ANSWER_LENGTH = 500
# What torch raises, as a plain RuntimeError, where another rank is gone or does not come.
OF_NETWORK = (
    "gloo",
    "nccl",
    "closed by peer",
    "pair closure",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
)
NOT_THE_USERS = ("site-packages", "dist-packages", str(Path(os.__file__).parent), str(Path(__file__).parents[1]))


class Watchdog:
    """Watches over all ranks, by a small process beside each of them; see watchdog_process.

    Collective: all ranks make one together, with the store that they have met at. limit_seconds: a rank that has been
    stopped for so long, or was not heard of, ends the others. still_seconds: after so long in which no rank gets on, it
    is said where they are.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        store: Store,
        limit_seconds: float,
        nodes: Sequence[str] = (),
        still_seconds: float = STILL_SECONDS,
    ) -> None:
        self._begun = self._asked = 0
        self._answered = threading.Event()
        self._answer: dict[str, str] = {}
        self._progress: Callable[[], str] = str
        self._main = threading.main_thread().ident or 0
        port, token = (0, secrets.token_hex(8)) if rank == 0 else json.loads(store.get(KEY))
        setting = Setting(rank, os.getpid(), list(nodes), host, port, token, limit_seconds, still_seconds)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog_process.__file__, json.dumps(asdict(setting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        if rank == 0:
            store.set(KEY, json.dumps([int(self._process.stdout.readline()), token]))
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def begin(self, progress: Callable[[], str]) -> None:
        """This rank begins a run, in which it needs the others. progress: called by another thread; how far it is."""
        self._progress = progress
        self._begun += 1
        self._tell(begun=self._begun)

    def end(self) -> None:
        """This rank has come to the end of its run."""
        self._tell(ended=self._begun)

    def explain(self, failure: BaseException) -> RankError | None:
        """This rank's run has failed. Return why, if that is with another rank, and tell the others if it is not."""
        said = None
        if is_of_network(failure):
            self._asked += 1
            self._tell(asked=self._asked)
            if self._answered.wait(ANSWER_SECONDS):
                verdict, places = self._answer["verdict"], self._answer["places"]
                said = f"{verdict}." if verdict else f"an exchange has failed. The ranks: {places}."
            self._answered.clear()
        is_repeated = said is not None or isinstance(failure, RankError)
        text = "" if is_repeated else f"{type(failure).__name__}: {failure}"[:ANSWER_LENGTH]
        self._tell(failed=self._begun, failure=text)
        return None if said is None else RankError(said)

    def close(self) -> None:
        """Watch no more; this process goes on."""
        self._tell(is_closed=True)

    def _tell(self, **changes: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # who is watched must not fail because the watch does
            self._process.stdin.write(json.dumps(changes).encode() + b"\n")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "question" in said:
                self._tell(question=said["question"], place=self._place(), progress=self._progress())
            else:
                self._answer = said
                self._answered.set()

    def _place(self) -> str:
        frames = sys._current_frames()  # noqa: SLF001  documented, whatever its name looks like
        return place_of(frames[self._main]) if self._main in frames else ""


def is_of_network(failure: BaseException) -> bool:
    """Whether an exception may be another rank's doing: torch and gloo raise what they say in words alone."""
    if isinstance(failure, RankError):
        return False
    words = str(failure).lower()
    return isinstance(failure, DistError | ConnectionError) or (
        isinstance(failure, RuntimeError) and any(word in words for word in OF_NETWORK)
    )


def place_of(frame: FrameType) -> str:
    """Return where a thread is: the innermost line of the user's own, and what it has called there."""
    inner = frame.f_code.co_name
    at: FrameType | None = frame
    while at is not None and (
        at.f_code.co_filename.startswith("<") or any(part in at.f_code.co_filename for part in NOT_THE_USERS)
    ):
        at = at.f_back
    own = frame if at is None else at
    where = f"{os.path.basename(own.f_code.co_filename)}:{own.f_lineno} in {own.f_code.co_name}"
    return where if own is frame else f"{where} ({inner})"
