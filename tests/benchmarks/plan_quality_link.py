"""Ranks on two machines, as many on each, joined by a link of limited rate: where plans take turns.

    python -m tests.benchmarks.plan_quality_link FOLDER MACHINE    what each machine runs;
    `on_limited_link` starts it

Needs root, `ip` and `tc`. The ranks of a machine are forked, because importing takes long.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.benchmarks.limited_link import job_of, run_on_link, save_result
from tests.benchmarks.performance_rounds import join_ranks
from tests.benchmarks.plan_quality_turns import Job, Measured, take_turns


def on_limited_link(job: Job, mbit_per_second: int, timeout_seconds: float) -> Measured:
    """Run a job on two machines that are joined by a link of this rate in each direction; raises as
    `run_on_link`."""
    result: Measured = run_on_link(
        "tests.benchmarks.plan_quality_link",
        job,
        mbit_per_second,
        timeout_seconds,
        lambda _, folder: {},
    )
    return result


def _rank(rank: int, job: Job, folder: str) -> None:
    os.environ.update({
        "RANK": str(rank),
        "WORLD_SIZE": str(job.places.num_ranks),
        "TEST_NUM_RANKS": str(job.places.num_ranks),
        "LOCAL_RANK": str(rank % job.places.ranks_on_node),
        "LOCAL_WORLD_SIZE": str(job.places.ranks_on_node),
        "NODE_RANK": str(job.places.node_of_rank[rank]),
    })
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        join_ranks()
        measured = take_turns(job, Path(folder))
        if rank == 0:
            save_result(measured, folder)
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
    job: Job = job_of(folder)
    fork = multiprocessing.get_context("fork")
    local = [rank for rank, node in enumerate(job.places.node_of_rank) if node == machine]
    ranks = [fork.Process(target=_rank, args=(rank, job, folder), daemon=True) for rank in local]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.2)
    for rank in ranks:
        if any(other.exitcode for other in ranks):
            rank.terminate()
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    # By its full name, so that what is saved is not a class of `__main__`.
    from tests.benchmarks import plan_quality_link

    plan_quality_link.main()
