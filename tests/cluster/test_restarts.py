"""kill -9 of any rank at any moment under torchrun: the attempts together are the run that never stopped."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.kills import check_trained, train_with_kills
from tests.support.limits import at_most

pytestmark = pytest.mark.cluster

KILLS = int(os.environ.get("DISTREC_KILLS", "2"))
SEED = int(os.environ.get("DISTREC_SEED", "0"))
PAUSE = 0.03
KINDS: dict[str, dict[str, Any]] = {
    "a file": {},
    "a folder": {"checkpoint": {"distributed": True}},
    "in the background": {"checkpoint": {"distributed": True, "async_save": True}},
}


@pytest.mark.slow
@pytest.mark.timeout(at_most(2 * KILLS))
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for seed in range(4) for kind in KINDS][: 20 // KILLS])
def test_a_job_whose_ranks_are_killed_trains_what_one_trains_that_nobody_kills(
    tmp_path: Path, kind: str, seed: int
) -> None:
    draw = random.Random(f"{kind} {seed} {SEED}")
    trained = train_with_kills(tmp_path, KILLS, draw, {**KINDS[kind], "pause": PAUSE})
    print(
        f"{trained.num_kills} kills; first steps {trained.first_steps}; last {trained.last_steps}; {trained.restarts}"
    )
    check_trained(trained, tmp_path)
