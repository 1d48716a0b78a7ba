"""A rank connects to the others in those groups in which all exchange something with all."""

from tests.benchmarks.ranks import OURS, train
from tests.support.ranks import run_on_ranks

RANKS = 4
OTHERS = 9
"""Sockets that do not grow with the number of ranks: of the store, of what listens, and of groups
that use few."""


def test_a_rank_has_three_sockets_to_each_other_one_and_rank_zero_two_more() -> None:
    """Of its store, and of the heartbeat."""
    sockets = [measured.sockets for measured in run_on_ranks(train, RANKS, OURS, 10)]
    assert max(sockets[1:]) <= 3 * (RANKS - 1) + OTHERS
    assert sockets[0] <= 5 * (RANKS - 1) + OTHERS + 2  # where these listen
