"""kill -9 of any rank at any moment under torchrun: the attempts together are the run that never
stopped."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_distrec.checkpoint.contents import verify
from tests.support.killed_script import NUM_STEPS
from tests.support.kills import check_trained, train_with_kills
from tests.support.limits import at_most
from tests.support.ports import free_port

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
@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for seed in range(4) for kind in KINDS][: 20 // KILLS]
)
def test_a_job_whose_ranks_are_killed_trains_what_one_trains_that_nobody_kills(
    tmp_path: Path, kind: str, seed: int
) -> None:
    draw = random.Random(f"{kind} {seed} {SEED}")
    trained = train_with_kills(tmp_path, KILLS, draw, {**KINDS[kind], "pause": PAUSE})
    print(
        f"{trained.num_kills} kills; first steps {trained.first_steps}; last "
        f"{trained.last_steps}; {trained.restarts}"
    )
    check_trained(trained, tmp_path)
    saved = list(tmp_path.rglob("*.ckpt"))
    assert len(saved) > 2
    assert {path.name: verify(path) for path in saved if verify(path)} == {}


@pytest.mark.slow
def test_a_rank_that_dies_after_the_fit_has_nothing_trained_again_without_an_id_of_the_job(
    tmp_path: Path,
) -> None:
    together = ("--nnodes=1:1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    trained = train_with_kills(tmp_path, 0, random.Random(0), {"dies_after_fit": True}, together)
    check_trained(trained, tmp_path)
    (restart,) = trained.restarts
    assert restart.step == NUM_STEPS
    assert "The fit had come to its end." in trained.printed
    assert trained.first_steps.keys() == {0}
