"""Two ranks on two machines: each in a network namespace of its own, joined by a link of limited
rate.

    python -m tests.benchmarks.performance_link FOLDER RANK    what each rank runs;
    `on_limited_link` starts it

Needs root, `ip` and `tc`.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from tests.benchmarks.limited_link import job_of, run_on_link, save_result
from tests.benchmarks.performance_rounds import Job, Times, join_ranks, take_turns

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
    """Run a job on two ranks that are joined by a link of this rate in each direction; raises as
    `run_on_link`."""

    def variables(rank: int, _: str) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "TEST_NUM_RANKS": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank),
        }

    result: OnLink = run_on_link(
        "tests.benchmarks.performance_link", job, mbit_per_second, timeout_seconds, variables
    )
    return result


def rates() -> tuple[float, float]:
    """Collective. Return the Mbit/s of long sends from rank 0 to 1, and each way of all-to-alls of
    a step's size."""
    rank = dist.get_rank()
    long = torch.zeros(8 * STEP_BYTES // 4)

    def send() -> None:
        dist.send(long, 1) if rank == 0 else dist.recv(long, 0)
        dist.barrier()

    sent = torch.zeros(2 * STEP_BYTES // 4)
    received = torch.zeros_like(sent)
    return _rate(send, 8 * STEP_BYTES), _rate(
        partial(dist.all_to_all_single, received, sent), STEP_BYTES
    )


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
    result = OnLink(take_turns(job_of(folder)), one_way, both_ways)
    if dist.get_rank() == 0:
        save_result(result, folder)


if __name__ == "__main__":
    # By its full name, so that what is saved is not a class of `__main__`.
    from tests.benchmarks import performance_link

    performance_link.main()
