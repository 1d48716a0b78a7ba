"""What a rank pays for each other one: sockets in those groups in which all exchange something
with all, and nothing at the store."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec.cluster import consensus
from tests.benchmarks.ranks import OURS, SmallCollection, count_sockets, draw_batches, train
from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer

STEPS = 5
OTHERS = 9
"""Sockets that do not grow with the number of ranks: of the store, of what listens, and of groups
that use few."""
STORE_REQUESTS = 60
"""Of the rank that asks least often whether the others have come. Where gloo asks for each rank's
address, rank 0 of 8 sends 137."""


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_rank_has_three_sockets_to_each_other_one_and_rank_zero_two_more(num_ranks: int) -> None:
    """Of its store, and of the heartbeat."""
    measured = run_on_ranks(train, num_ranks, OURS, STEPS)
    sockets = [rank.sockets for rank in measured]
    assert max(sockets[1:]) <= 3 * (num_ranks - 1) + OTHERS
    assert sockets[0] <= 5 * (num_ranks - 1) + OTHERS + 2  # where these listen
    assert min(rank.store_requests for rank in measured) <= STORE_REQUESTS


def _fit(ids_group_ranks: int) -> tuple[int, dict[str, Tensor]]:
    inherited = count_sockets()
    consensus.IDS_GROUP_RANKS = ids_group_ranks
    torch.manual_seed(1)
    loader: Any = DataLoader(draw_batches(2 * STEPS), batch_size=None)
    trainer = make_trainer(max_steps=2 * STEPS)
    trainer.fit(SmallCollection(), loader)
    return count_sockets() - inherited, trainer.strategy.full_state_dict()


def test_ids_in_the_group_of_rows_spare_a_socket_to_each_rank_and_change_no_bit() -> None:
    (own, expected), *_ = run_on_ranks(_fit, 4, 4)
    (shared, weights), *_ = run_on_ranks(_fit, 4, 3)
    assert shared == own - 3
    assert expected.keys() == weights.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
