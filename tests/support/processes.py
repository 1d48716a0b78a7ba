"""Processes of a test that must not outlive it: found by what is in their environment, killed with
their keeper."""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def kill_all_with(*texts: str) -> None:
    """Kill all processes with all `texts` in their command and environment, and all that these have
    started."""
    while actual := processes_with(*texts):
        for pid in actual:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_with(*texts: str) -> set[int]:
    """Return the processes with all `texts` in their command and environment, and all that these
    have started."""
    actual, parents = set(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
            content = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if all(text.encode() in content for text in texts):
                actual.add(int(process.name))
    while extra := {pid for pid, parent in parents.items() if parent in actual} - actual:
        actual |= extra
    return actual - {os.getpid()}


# the keeper: waits for the end of the process that holds its input, then clears up
if __name__ == "__main__":
    sys.stdin.read()
    kill_all_with(sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
