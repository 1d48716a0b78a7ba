"""Threads of a rank, by the CPUs that it and the others on its node were given."""

import pytest

from lightning_distrec.cluster.host_resources import num_threads

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
    ids=["alone", "shared", "bound apart", "on two nodes", "unequal nodes", "one CPU", "more ranks than CPUs"],
)
def test_ranks_share_the_cpus_they_were_given(ranks, threads):
    assert [num_threads(ranks, rank, {}) for rank in range(len(ranks))] == threads


def test_what_slurm_was_asked_for_is_the_most():
    assert num_threads([(0, ALL)], 0, {"SLURM_CPUS_PER_TASK": "4"}) == 4
    assert num_threads([(0, ALL)], 0, {"SLURM_CPUS_PER_TASK": "40"}) == 16
    assert num_threads([(0, ALL)], 0, {"SLURM_CPUS_PER_TASK": ""}) == 16
