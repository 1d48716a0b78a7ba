"""kill -9 of any rank at any moment, with copies in memory and no checkpoint on disk."""

import os
import random
from pathlib import Path

import pytest

from tests.support.kills import Trained, check_trained, train_with_kills
from tests.support.limits import at_most
from tests.support.shared_memory import folder_in_memory

pytestmark = pytest.mark.cluster

EVERY = 4
KILLS = int(os.environ.get("DISTREC_KILLS", "2"))
SEED = int(os.environ.get("DISTREC_SEED", "0"))


@pytest.mark.slow
@pytest.mark.timeout(at_most(2 * KILLS))
@pytest.mark.parametrize("seed", range(3))
def test_a_job_whose_ranks_are_killed_goes_on_from_memory_at_most_so_many_steps_back(tmp_path: Path, seed: int) -> None:
    draw = random.Random(f"{seed} {SEED}")
    with folder_in_memory() as memory:
        options = {
            "on_disk": False,
            "pause": 0.03,
            "checkpoint": {"in_memory": {"every": EVERY, "folder": str(memory)}},
        }
        trained = train_with_kills(tmp_path, KILLS, draw, options)
        assert [*memory.glob("*/*")] == []
    print(f"{trained.num_kills} kills; {trained.first_steps}; {trained.last_steps}; {trained.restarts}")
    check_trained(trained, memory)
    check_few_are_lost(trained)


def check_few_are_lost(trained: Trained) -> None:
    """Check how far back each attempt began: at most twice `EVERY` steps, while the latest copy is being taken."""
    attempts = sorted(trained.first_steps)
    for before, after in zip(attempts, attempts[1:], strict=False):
        assert trained.last_steps[before] + 1 - trained.first_steps[after] <= 2 * EVERY
