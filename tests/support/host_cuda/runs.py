"""Runs functions on ranks whose devices are in host memory, from a process that has none."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cuda.__main__ import environment
from tests.support.host_cuda.building import CannotBuild
from tests.support.limits import LIMIT_SECONDS
from tests.support.ranks import FAREWELL_SECONDS

ROOT = Path(__file__).parents[3]


@dataclass
class Seen:
    """What a function returned on a rank, and what its device saw of it."""

    result: Any
    hazards: list[tuple[str, str, int]]
    """What, where, how often."""
    waits: list[tuple[str, str, int]]
    error: str = ""


class DeviceRanks:
    """Ranks that have a device each, and stay for the next call."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = LIMIT_SECONDS,
        ends: bool = False,
    ) -> list[Seen]:
        """Return what the function returned or raised on each rank.

        ends: a rank on which it raises ends, as a script does. Raises RankFailed: that, a rank
        died, or was late.
        """
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "call").write_bytes(
                pickle.dumps((function, args, timeout_seconds, ends))
            )
            print(folder, file=self._process.stdin, flush=True)
            assert self._process.stdout.readline() == "done\n", (
                "the process of the device's ranks has ended"
            )
            answer = pickle.loads((Path(folder) / "answer").read_bytes())
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


@contextmanager
def device_ranks(num_ranks: int, device_bytes: int = 8 << 30) -> Iterator[DeviceRanks]:
    """Give ranks that have a device each of so much memory; skips the test where the device cannot
    be built."""
    command = [sys.executable, "-m", "tests.support.host_cuda.ranks", str(num_ranks)]
    environ = variables_or_skip(num_ranks, device_bytes)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield DeviceRanks(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(FAREWELL_SECONDS)
        finally:
            process.kill()


def variables_or_skip(devices: int, device_bytes: int = 8 << 30) -> dict[str, str]:
    """Return the variables of processes that have the device; skips the test where it cannot be
    built."""
    try:
        environ = environment(devices, device_bytes)
    except CannotBuild as error:
        pytest.skip(str(error))
    return environ | {"PYTHONPATH": os.pathsep.join([environ["PYTHONPATH"], str(ROOT)])}
