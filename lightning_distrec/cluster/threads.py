"""Number of threads of a rank: its CPUs, divided among the ranks that were given the same CPUs."""

import ctypes
import os
from collections.abc import Mapping, Sequence

import torch

Cpus = tuple[int, frozenset[int]]
"""A rank's node, and the CPUs it may run on."""

VARIABLE = "OMP_NUM_THREADS"
OMP_PAUSE_HARD = 2


def cpus_of_this_process(node: int) -> Cpus:
    """Return the CPUs that this process may run on, as the scheduler has bound it."""
    return node, frozenset(os.sched_getaffinity(0))


def num_threads(ranks: Sequence[Cpus], rank: int, given: Mapping[str, str]) -> int:
    """Return the number of threads for `rank`. given: the environment, with Slurm's `--cpus-per-task`."""
    node, mine = ranks[rank]
    sharers = sum(bool(cpus & mine) for other, cpus in ranks if other == node)
    threads = len(mine) // sharers
    if given.get("SLURM_CPUS_PER_TASK", "").isdigit():
        threads = min(threads, int(given["SLURM_CPUS_PER_TASK"]))
    return max(1, threads)


def use_threads(number: int) -> None:
    """Set the number of threads of torch, and of the processes that this one starts."""
    torch.set_num_threads(number)
    os.environ[VARIABLE] = str(number)


def end_threads() -> bool:
    """End OpenMP's idle threads, which begin again when they are needed; return whether that worked.

    A process that is forked while libgomp has some believes that it has them too, and waits for them forever.
    Source: omp_pause_resource_all of OpenMP 5.0, which libgomp has since GCC 9.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # torch loads its OpenMP for all to see
    return pause is not None and pause(OMP_PAUSE_HARD) == 0
