"""Runs calls on ranks that have the device: `python -m tests.support.host_cuda.ranks FOLDER`, for runs.py."""

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.support.host_cuda.runs import Seen
from tests.support.ranks import run_on_ranks


def call_each(calls: dict[str, tuple[Any, ...]]) -> dict[str, Seen]:
    """Return what each call returns here, or raises, and what the device saw of it."""
    import host_cuda_runtime as device

    results: dict[str, Seen] = {}
    for name, (function, *args) in calls.items():
        device.forget_reports()
        result, error = None, ""
        try:
            result = function(*args)
        except Exception:
            error = traceback.format_exc()
        results[name] = Seen(result, device.reports("hazard"), device.reports("wait"), error)
    return results


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    calls, num_ranks, timeout_seconds = pickle.loads((folder / "calls").read_bytes())
    results = run_on_ranks(call_each, num_ranks, calls, timeout_seconds=timeout_seconds)
    (folder / "results").write_bytes(pickle.dumps(results))
