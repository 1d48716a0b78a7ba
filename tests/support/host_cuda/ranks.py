"""Ranks that have the device, and stay: `python -m tests.support.host_cuda.ranks NUM_RANKS`, for
runs.py."""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.host_cuda.runs import Seen
from tests.support.ranks import RankFailed, run_on_warm_ranks, stop_warm_ranks


def call(function: Callable[..., Any], args: tuple[Any, ...], ends: bool) -> Seen:
    """Return what a function returns here, or raises, and what the device saw of it."""
    import host_cuda_runtime as device

    device.forget_reports()
    result, error = None, ""
    try:
        result = function(*args)
    except Exception:
        if ends:
            raise
        error = traceback.format_exc()
    return Seen(result, device.reports("hazard"), device.reports("wait"), error)


def serve(num_ranks: int) -> None:
    """Read folders from stdin; answer the call that each holds beside it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    for line in sys.stdin:
        folder = Path(line.strip())
        function, args, timeout_seconds, ends = pickle.loads((folder / "call").read_bytes())
        try:
            answer: Any = run_on_warm_ranks(
                call, num_ranks, function, args, ends, timeout_seconds=timeout_seconds
            )
        except RankFailed as failed:
            answer = failed
        (folder / "answer").write_bytes(pickle.dumps(answer))
        print("done", file=answers, flush=True)
    stop_warm_ranks()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
