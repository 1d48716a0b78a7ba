"""Two ranks on two machines: each in a network namespace of its own, joined by a link of limited rate.

    python -m tests.benchmarks.performance_link FOLDER    what each rank runs; `on_limited_link` starts it

Needs root, `ip` and `tc`.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.performance_rounds import CannotMeasure, Job, Times, join_ranks, take_turns
from tests.support.two_machines import ADDRESSES, Machine, NoMachines, two_machines

PORT = 29500
STEP_BYTES = 500_000
"""About what a step's largest exchange sends to the other rank."""


@dataclass(frozen=True)
class OnLink:
    """What was measured on a link."""

    times: Times
    one_way: float
    """Mbit/s from rank 0 to rank 1, of long sends."""
    both_ways: float
    """Mbit/s each way of all-to-alls of a step's size, with pauses between them."""


def on_limited_link(job: Job, mbit_per_second: int, timeout_seconds: float) -> OnLink:
    """Run a job on two ranks that are joined by a link of this rate in each direction.

    Raises CannotMeasure: there can be no such link here. RuntimeError: a rank failed or was not done in time.
    """
    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        try:
            machines = started.enter_context(two_machines(mbit_per_second))
        except NoMachines as error:
            raise CannotMeasure(str(error)) from error
        torch.save(job, f"{folder}/job.pt")
        ranks = []
        for rank, machine in enumerate(machines):
            output = started.enter_context(open(f"{folder}/{rank}.log", "w"))
            ranks.append(_start(rank, machine, folder, output))
            started.callback(_end, ranks[-1])
        _wait(ranks, folder, timeout_seconds)
        return torch.load(f"{folder}/result.pt", weights_only=False)


def _start(rank: int, machine: Machine, folder: str, output: object) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "TEST_NUM_RANKS": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": machine.device,
    }
    command = machine.command(sys.executable, "-m", "tests.benchmarks.performance_link", folder)
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _wait(ranks: list[subprocess.Popen], folder: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks on the link were not done after {timeout_seconds:.0f} s")
        time.sleep(0.2)
    failed = [number for number, rank in enumerate(ranks) if rank.poll()]
    if failed:
        said = Path(f"{folder}/{failed[0]}.log").read_text()
        raise RuntimeError(f"rank {failed[0]} on the link failed:\n{said}")


def rates() -> tuple[float, float]:
    """Collective. Return the Mbit/s of long sends from rank 0 to 1, and each way of all-to-alls of a step's size."""
    rank = dist.get_rank()
    long = torch.zeros(8 * STEP_BYTES // 4)

    def send() -> None:
        dist.send(long, 1) if rank == 0 else dist.recv(long, 0)
        dist.barrier()

    sent = torch.zeros(2 * STEP_BYTES // 4)
    received = torch.zeros_like(sent)
    return _rate(send, 8 * STEP_BYTES), _rate(partial(dist.all_to_all_single, received, sent), STEP_BYTES)


def _rate(action: Callable[[], object], num_bytes: int) -> float:
    seconds = []
    for _ in range(12):
        time.sleep(0.03)
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return num_bytes * 8 / 1e6 / statistics.median(seconds[4:])  # until then TCP's windows grow


def main() -> None:
    """Run the job of a folder on this rank; rank 0 writes what it saw."""
    folder = sys.argv[1]
    torch.set_num_threads(1)
    join_ranks()
    one_way, both_ways = rates()
    result = OnLink(take_turns(torch.load(f"{folder}/job.pt", weights_only=False)), one_way, both_ways)
    if dist.get_rank() == 0:
        torch.save(result, f"{folder}/result.pt")


if __name__ == "__main__":
    # By its full name, so that what is saved is not a class of `__main__`.
    from tests.benchmarks import performance_link

    performance_link.main()
