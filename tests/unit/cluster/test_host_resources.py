"""Threads of a rank, by the CPUs that it and the others on its node were given, and files that it
may open."""

import os
import resource
from multiprocessing import get_context

import pytest
import torch

from lightning_distrec.cluster.host_resources import end_threads, num_threads, reserve_open_files
from lightning_distrec.errors import ConfigError

ALL = frozenset(range(16))


def _half(half: int) -> frozenset[int]:
    return frozenset(range(8 * half, 8 * half + 8))


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        ([(0, ALL)], [16]),
        ([(0, ALL), (0, ALL)], [8, 8]),
        ([(0, _half(0)), (0, _half(1))], [8, 8]),
        ([(0, ALL), (1, ALL)], [16, 16]),
        ([(0, ALL), (0, ALL), (0, ALL), (1, ALL)], [5, 5, 5, 16]),
        ([(0, frozenset({3})), (0, frozenset({3}))], [1, 1]),
        ([(0, ALL)] * 40, [1] * 40),
    ],
)
def test_ranks_share_the_cpus_they_were_given(ranks, threads):
    assert [num_threads(ranks, rank, {}) for rank in range(len(ranks))] == threads


def test_what_slurm_was_asked_for_is_the_most():
    assert num_threads([(0, ALL)], 0, {"SLURM_CPUS_PER_TASK": "4"}) == 4
    assert num_threads([(0, ALL)], 0, {"SLURM_CPUS_PER_TASK": "40"}) == 16
    assert num_threads([(0, ALL)], 0, {"SLURM_CPUS_PER_TASK": ""}) == 16


def _reserve(calls: tuple[tuple[int, str], ...]) -> list[str]:
    """Return what becomes of each call in a process that may have 1000 files open, of which 300 at
    first."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    outcomes = []
    for num_ranks, backend in calls:
        try:
            reserve_open_files(num_ranks, backend)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            outcomes.append(f"{limits} {os.environ['TORCH_GLOO_LAZY_INIT']}")
        except ConfigError as error:
            outcomes.append(str(error))
    return outcomes


def test_a_rank_may_open_what_the_system_lets_it_and_too_many_ranks_are_refused() -> None:
    calls = ((186, "gloo"), (187, "gloo"), (248, "nccl"), (249, "cpu:gloo,cuda:nccl"))
    with get_context("fork").Pool(1) as process:
        fits, gloo, nccl, too_many = process.apply(_reserve, (calls,))
    assert fits == nccl == "(1000, 1000) 1"
    assert gloo.startswith(
        "a rank in a job of 187 needs 1004 open files, most of them sockets, and may open 1000."
    )
    assert "`ulimit -n 1004`" in gloo
    assert too_many.startswith("a rank in a job of 249 needs 1003 open files")


def _use_two_threads() -> None:
    torch.set_num_threads(2)
    torch.ones(1_000_000).exp()


def test_a_fork_of_a_process_whose_threads_have_ended_begins_its_own() -> None:
    threads = torch.get_num_threads()
    _use_two_threads()
    assert end_threads()
    fork = get_context("fork").Process(target=_use_two_threads)
    fork.start()
    try:
        fork.join(60)
        assert fork.exitcode == 0, "it waits for threads that only its parent has"
    finally:
        fork.kill()
        fork.join()
        torch.set_num_threads(threads)
