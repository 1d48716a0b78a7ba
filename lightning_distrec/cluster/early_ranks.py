"""Processes for a command's other ranks, which import what ranks need while rank 0 does.

Lightning starts ranks when rank 0 has imported all and parsed its command line; they would import
it again then, and rank 0 wait. Nothing here loads torch, except in those processes.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

CODE = f"""
import gc, signal
gc.disable()
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
import {__name__} as early
early.wait()
"""
"""What an early process runs: nothing is collected before `wait` has imported all; an interrupt
ends it without a word as long as it is no rank, unless interrupts are ignored, as in the background
of a shell script."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Around imports: do not look for garbage among what modules hold, now or later.

    That takes an eighth of the imports' time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class EarlyRank:
    """A process that becomes a rank of this node once it has received what a rank inherits.

    local_rank: its number on the node. strategy: a class of ours, whose modules it imports.
    arguments: those of the command, for who looks at the list of processes.
    """

    def __init__(self, local_rank: int, strategy: str, arguments: Sequence[str]) -> None:
        reading, self._writing = os.pipe()
        # Lightning asks for it at its import.
        variables = os.environ | {"LOCAL_RANK": str(local_rank)}
        command = [sys.executable, "-c", CODE, str(reading), strategy, *arguments]
        self.process = subprocess.Popen(command, env=variables, pass_fds=[reading])
        os.close(reading)

    def become_rank(self, variables: Mapping[str, str]) -> bool:
        """Let it run this process's command line with these variables; return whether it will."""
        state = {
            "argv": sys.argv,
            "path": sys.path,
            "folder": os.getcwd(),
            "variables": dict(variables),
        }
        with suppress(BrokenPipeError), open(self._writing, "w") as pipe:
            json.dump(state, pipe)
        # A pipe takes some bytes even where the reader has died.
        return self.process.poll() is None

    def end(self) -> None:
        """End it: nobody needs it."""
        self.process.kill()
        os.close(self._writing)
        self.process.wait()


_early: dict[str, EarlyRank] = {}
"""LOCAL_RANK -> a process that waits."""


@contextmanager
def early_ranks(num_ranks: int, strategy: str, arguments: Sequence[str]) -> Iterator[None]:
    """Around a command: start processes for its other ranks; those that nobody has needed end with
    it."""
    # More would take rank 0's time from it.
    for local_rank in range(1, min(num_ranks, os.cpu_count() or 1)):
        _early[str(local_rank)] = EarlyRank(local_rank, strategy, arguments)
    try:
        yield
    finally:
        while _early:
            _early.popitem()[1].end()


def start_rank(command: list[str], env: dict[str, str], cwd: str | None) -> Any:
    """Return the process of another rank: an early one, or a new one, as `subprocess.Popen` starts
    it."""
    early = _early.pop(env["LOCAL_RANK"], None) if cwd is None else None
    if early is not None and early.become_rank(env):
        return early.process
    return subprocess.Popen(command, env=env, cwd=cwd)


def wait() -> None:
    """Import what ranks need, wait for what a rank inherits, and be one. Called in an early
    process."""
    descriptor, strategy = sys.argv[1:3]
    # The command reports what is wrong when it comes to it.
    with suppress(Exception), without_collections():
        import_module("lightning_distrec.cli.fit_cli")
        getattr(import_module("lightning_distrec"), strategy)
    with open(int(descriptor), "rb") as pipe:
        message = pipe.read()
    if not message:
        sys.exit(0)
    state = json.loads(message)
    os.environ.clear()
    os.environ.update(state["variables"])
    os.chdir(state["folder"])
    sys.argv[:], sys.path[:] = state["argv"], state["path"]
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(import_module("lightning_distrec.cli.main").main())
