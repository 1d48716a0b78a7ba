"""Ranks that wait for each other at the end of a run."""

from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_distrec.errors import RankError
from lightning_distrec.strategies.run import calls_outside


@pytest.mark.parametrize("has_come", [True, False])
def test_a_rank_that_came_and_failed_later_is_no_failure_of_the_wait(has_come: bool) -> None:
    store = dist.HashStore()

    def look(seconds: float, num_arrived: int) -> None:
        if has_come:
            store.add("end of run 1", 1)
        raise RankError("rank 0 failed in its next run.")

    with (
        patch.object(calls_outside, "default_store", lambda: store),
        patch.object(dist, "get_world_size", lambda: 2),
    ):
        if has_come:
            assert calls_outside.wait_for_all("end of run 1", 5.0, look)
        else:
            with pytest.raises(RankError, match="rank 0 failed"):
                calls_outside.wait_for_all("end of run 1", 5.0, look)
