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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.performance_rounds import CannotMeasure, Job, Times, join_ranks, take_turns

ADDRESSES = ("10.199.0.1", "10.199.0.2")
PORT = 29500
LEAST_BURST_KILOBYTES = 64
QUEUE = "50ms"
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
    with _two_namespaces(mbit_per_second) as (spaces, devices), tempfile.TemporaryDirectory() as folder:
        torch.save(job, f"{folder}/job.pt")
        with ExitStack() as started:
            ranks = []
            for rank in range(2):
                output = started.enter_context(open(f"{folder}/{rank}.log", "w"))
                ranks.append(_start(rank, spaces[rank], devices[rank], folder, output))
                started.callback(_end, ranks[-1])
            _wait(ranks, folder, timeout_seconds)
        return torch.load(f"{folder}/result.pt", weights_only=False)


def _start(rank: int, space: str, device: str, folder: str, output: object) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "TEST_NUM_RANKS": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": device,
    }
    command = ["ip", "netns", "exec", space, sys.executable, "-m", "tests.benchmarks.performance_link", folder]
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


@contextmanager
def _two_namespaces(mbit_per_second: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield two namespaces and the device in each; they are gone after the context."""
    spaces = [f"distrec{os.getpid()}{side}" for side in "ab"]
    devices = [f"dr{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as made:
        for space in spaces:
            _run("ip", "netns", "add", space)
            made.callback(_run, "ip", "netns", "del", space)
        _run("ip", "-n", spaces[0], "link", "add", devices[0], "type", "veth", "peer", devices[1], "netns", spaces[1])
        for space, device, address in zip(spaces, devices, ADDRESSES, strict=True):
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", space, "link", "set", device, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            limit = ("rate", f"{mbit_per_second}mbit", "burst", _burst(mbit_per_second), "latency", QUEUE)
            _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield spaces, devices


def _burst(mbit_per_second: int) -> str:
    """Return what may pass at once: a millisecond's worth, less than which timers cannot follow."""
    return f"{max(LEAST_BURST_KILOBYTES, mbit_per_second // 8)}kb"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CannotMeasure(f"there is no `{command[0]}` on this machine") from error
    except subprocess.CalledProcessError as error:
        raise CannotMeasure(f"`{' '.join(command)}`: {error.stderr.strip()}") from error


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
