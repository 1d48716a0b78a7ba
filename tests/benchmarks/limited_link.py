"""Runs a function on ranks of two machines that are joined by a link of limited rate.

    python -m tests.benchmarks.limited_link FOLDER MACHINE    what `run_on_link` starts on each

Needs root, `ip` and `tc`. The ranks of a machine are forked, because importing takes long.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.report import CannotMeasure
from tests.benchmarks.turns import join_ranks
from tests.support.two_machines import ADDRESSES, Machine, NoMachines, two_machines

PORT = 29500
JOB, RESULT = "job.pt", "result.pt"


@dataclass(frozen=True)
class Job:
    """What each rank calls."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    ranks_on_machine: int


def run_on_link(
    function: Callable[..., Any],
    *args: Any,
    mbit_per_second: int,
    ranks_on_machine: int = 1,
    timeout_seconds: float = 900.0,
) -> Any:
    """Return what `function(*args)` returns on rank 0 of those of two machines.

    function: importable by name; it finds the process group. mbit_per_second: the link's rate in
    each direction. Raises CannotMeasure: there can be no such link here. RuntimeError: a rank
    failed, or was not done in time.
    """
    # Who ends this process by a signal leaves no machines behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        try:
            machines = started.enter_context(two_machines(mbit_per_second))
        except NoMachines as error:
            raise CannotMeasure(str(error)) from error
        torch.save(Job(function, args, ranks_on_machine), f"{folder}/{JOB}")
        running = []
        for number, machine in enumerate(machines):
            process = _start(machine, folder, number)
            started.callback(_end, process)
            running.append(process)
        _wait(running, folder, timeout_seconds)
        return torch.load(f"{folder}/{RESULT}", weights_only=False)


def _start(machine: Machine, folder: str, number: int) -> subprocess.Popen:
    environment = os.environ | {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": machine.device,
    }
    module = "tests.benchmarks.limited_link"
    command = machine.command(sys.executable, "-m", module, folder, str(number))
    with open(f"{folder}/{number}.log", "w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _end(process: subprocess.Popen) -> None:
    process.terminate()  # it may have processes of its own to end
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(running: list[subprocess.Popen], folder: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        statuses = [process.poll() for process in running]
        if any(statuses) or None not in statuses:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks on the link were not done after {timeout_seconds:.0f} s")
        time.sleep(0.2)
    for number, status in enumerate(statuses):
        if status:
            output = Path(f"{folder}/{number}.log").read_text()
            raise RuntimeError(f"a rank of machine {number} on the link failed:\n{output[-4000:]}")


def _run_rank(rank: int, job: Job, folder: str) -> None:
    machine, local_rank = divmod(rank, job.ranks_on_machine)
    os.environ.update({
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * job.ranks_on_machine),
        "TEST_NUM_RANKS": str(2 * job.ranks_on_machine),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.ranks_on_machine),
        "NODE_RANK": str(machine),
    })
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        join_ranks()
        result = job.function(*job.args)
        if rank == 0:
            torch.save(result, f"{folder}/{RESULT}")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # gloo's threads outlive Python's objects


def main() -> None:
    """Run the ranks of one machine; exits with 1 as soon as one of them failed."""
    folder, machine = sys.argv[1], int(sys.argv[2])
    # its ranks, as daemons, are ended with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    job: Job = torch.load(f"{folder}/{JOB}", weights_only=False)
    fork = multiprocessing.get_context("fork")
    first = machine * job.ranks_on_machine
    numbers = range(first, first + job.ranks_on_machine)
    ranks = [
        fork.Process(target=_run_rank, args=(number, job, folder), daemon=True)
        for number in numbers
    ]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.2)
    failed = any(rank.exitcode for rank in ranks)
    for rank in ranks:
        if failed:
            rank.terminate()
        rank.join()
    sys.exit(failed)


if __name__ == "__main__":
    # By its full name, so that what is saved is not a class of `__main__`.
    from tests.benchmarks import limited_link

    limited_link.main()
