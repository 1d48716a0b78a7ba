"""Runs a job in two processes, each on a machine of its own, that are joined by a link of limited
rate.

Needs root, `ip` and `tc`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.performance_rounds import CannotMeasure
from tests.support.two_machines import ADDRESSES, NoMachines, two_machines

PORT = 29500
JOB, RESULT = "job.pt", "result.pt"


def run_on_link(
    module: str,
    job: object,
    mbit_per_second: int,
    timeout_seconds: float,
    variables: Callable[[int, str], dict[str, str]],
) -> Any:
    """Run `python -m module FOLDER NUMBER` on machines 0 and 1; return what one of them saves as
    RESULT in the folder.

    job: what they find there as JOB. mbit_per_second: the link's rate in each direction. variables:
    of the environment, by a machine's number and the folder, beside the address to meet at.
    Raises CannotMeasure: there can be no such link here. RuntimeError: a process failed or was not
    done in time.
    """
    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        try:
            machines = started.enter_context(two_machines(mbit_per_second))
        except NoMachines as error:
            raise CannotMeasure(str(error)) from error
        torch.save(job, f"{folder}/{JOB}")
        running = []
        for number, machine in enumerate(machines):
            output = started.enter_context(open(f"{folder}/{number}.log", "w"))
            environment = os.environ | variables(number, folder)
            environment |= {
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": machine.device,
            }
            command = machine.command(sys.executable, "-m", module, folder, str(number))
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            started.callback(_end, process)
            running.append(process)
        _wait(running, folder, timeout_seconds)
        return torch.load(f"{folder}/{RESULT}", weights_only=False)


def job_of(folder: str) -> Any:
    """Return what was to be done."""
    return torch.load(f"{folder}/{JOB}", weights_only=False)


def save_result(result: object, folder: str) -> None:
    """Leave what `run_on_link` returns."""
    torch.save(result, f"{folder}/{RESULT}")


def _end(process: subprocess.Popen) -> None:
    process.terminate()  # it may have processes of its own to end
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(running: list[subprocess.Popen], folder: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(process.poll() is None for process in running) and not any(
        process.poll() for process in running
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks on the link were not done after {timeout_seconds:.0f} s")
        time.sleep(0.2)
    failed = [number for number, process in enumerate(running) if process.poll()]
    if failed:
        message = Path(f"{folder}/{failed[0]}.log").read_text()
        raise RuntimeError(f"a rank of machine {failed[0]} on the link failed:\n{message[-4000:]}")
