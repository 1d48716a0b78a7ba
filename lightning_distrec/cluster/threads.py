"""How many threads a rank may use: those of the CPUs it was given, shared with the ranks that were given the same."""

import os
from collections.abc import Mapping, Sequence

import torch

Cpus = tuple[int, frozenset[int]]
"""A rank's node, and the CPUs it may run on."""

VARIABLE = "OMP_NUM_THREADS"


def cpus_of_this_process(node: int) -> Cpus:
    """Return the CPUs that this process may run on: those of the machine, less what the scheduler has bound it to."""
    return node, frozenset(os.sched_getaffinity(0))


def num_threads(ranks: Sequence[Cpus], rank: int, given: Mapping[str, str]) -> int:
    """Return the number of threads for `rank`. given: the environment, where Slurm says what `--cpus-per-task` was."""
    node, mine = ranks[rank]
    sharers = sum(bool(cpus & mine) for other, cpus in ranks if other == node)
    threads = len(mine) // sharers
    if given.get("SLURM_CPUS_PER_TASK", "").isdigit():
        threads = min(threads, int(given["SLURM_CPUS_PER_TASK"]))
    return max(1, threads)


def use_threads(number: int) -> None:
    """Let torch use so many threads, and the processes that this one starts."""
    torch.set_num_threads(number)
    os.environ[VARIABLE] = str(number)
