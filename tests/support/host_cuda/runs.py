"""Runs functions on ranks whose devices are in host memory, from a process that has none."""

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cuda.__main__ import environment
from tests.support.host_cuda.building import CannotBuild
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[3]


@dataclass
class Seen:
    """What a function returned on a rank, and what its device saw of it."""

    result: Any
    hazards: list[tuple[str, str, int]]
    """What, where, how often."""
    waits: list[tuple[str, str, int]]
    error: str = ""


def run_each_on_devices(
    calls: dict[str, tuple[Any, ...]],
    num_ranks: int,
    timeout_seconds: float = LIMIT_SECONDS,
) -> list[dict[str, Seen]]:
    """Return what each call returns on each rank, as `run_each_on_ranks`; skips the test where nothing can be built."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calls").write_bytes(pickle.dumps((calls, num_ranks, timeout_seconds)))
        run_on_device("-m", "tests.support.host_cuda.ranks", folder, devices=num_ranks)
        results: list[dict[str, Seen]] = pickle.loads((Path(folder) / "results").read_bytes())
        return results


def run_on_device(
    *command: str, devices: int = 1, device_bytes: int = 8 << 30, variables: dict[str, str] | None = None
) -> str:
    """Return what Python prints with the device; fails with its output where it does not exit with 0."""
    try:
        environ = environment(devices, device_bytes) | (variables or {})
    except CannotBuild as error:
        pytest.skip(str(error))
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
