"""Ranks on two machines, as many on each, joined by a link of limited rate: where plans take turns.

    python -m tests.benchmarks.plan_quality_link FOLDER MACHINE    what each machine runs; `on_limited_link` starts it

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
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.benchmarks.performance_rounds import CannotMeasure, join_ranks
from tests.benchmarks.plan_quality_turns import Job, Measured, take_turns
from tests.support.two_machines import ADDRESSES, NoMachines, two_machines

PORT = 29500


def on_limited_link(job: Job, mbit_per_second: int, timeout_seconds: float) -> Measured:
    """Run a job on two machines that are joined by a link of this rate in each direction.

    Raises CannotMeasure: there can be no such link here. RuntimeError: a rank failed or was not done in time.
    """
    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        try:
            machines = started.enter_context(two_machines(mbit_per_second))
        except NoMachines as error:
            raise CannotMeasure(str(error)) from error
        torch.save(job, f"{folder}/job.pt")
        running = []
        for number, machine in enumerate(machines):
            output = started.enter_context(open(f"{folder}/{number}.log", "w"))
            command = [sys.executable, "-m", "tests.benchmarks.plan_quality_link", folder, str(number)]
            environment = os.environ | {
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": machine.device,
                # Measurements of this link are remembered for it alone.
                "XDG_CACHE_HOME": folder,
            }
            process = subprocess.Popen(
                machine.command(*command), env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            started.callback(_end, process)
            running.append(process)
        _wait(running, folder, timeout_seconds)
        result: Measured = torch.load(f"{folder}/result.pt", weights_only=False)
        return result


def _end(process: subprocess.Popen) -> None:
    process.terminate()  # the machine's process then ends its ranks
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(running: list[subprocess.Popen], folder: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(machine.poll() is None for machine in running) and not any(machine.poll() for machine in running):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the ranks on the link were not done after {timeout_seconds:.0f} s")
        time.sleep(0.2)
    failed = [number for number, machine in enumerate(running) if machine.poll()]
    if failed:
        said = Path(f"{folder}/{failed[0]}.log").read_text()
        raise RuntimeError(f"a rank of machine {failed[0]} on the link failed:\n{said[-4000:]}")


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
            torch.save(measured, f"{folder}/result.pt")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # gloo's threads outlive Python's objects


def main() -> None:
    """Run the ranks of one machine; exits with 1 as soon as one of them failed."""
    folder, machine = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its ranks, as daemons, are ended with it
    job: Job = torch.load(f"{folder}/job.pt", weights_only=False)
    fork = multiprocessing.get_context("fork")
    here = [rank for rank, node in enumerate(job.places.node_of_rank) if node == machine]
    ranks = [fork.Process(target=_rank, args=(rank, job, folder), daemon=True) for rank in here]
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
