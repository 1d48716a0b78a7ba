"""What users do between backward and step gives what it gives in one process: adversarial rows,
SAM, repairs, logs."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import Case, case_of, check
from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, loader, pairs, too_far, whole_state
from tests.support.gradient_programs import (
    LAMB,
    STEPS,
    GradientProgram,
    as_list,
    gradient_batch,
    logged,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

TYPES = ["row_wise", "table_wise", "column_wise"]


def case(seed: int, manual: bool, num_ranks: int = 2) -> Case:
    model = GradientProgram(seed, manual)
    # An optimizer of the user's is taken as it is asked for, and then checked in what it computes.
    update = "dense" if model.attack == "SAM" or model.optimizer == "LAMB" else "auto"
    strategy = {
        "convert_embeddings": "all",
        "sharding_types": [TYPES[seed % 3]],
        "embedding_update": update,
    }
    fields = {"batch": gradient_batch, "join": as_list, "steps": STEPS, "limit": 2e-5}
    fields |= {"same": logged, "loss_limit": None}
    return case_of(GradientProgram, seed, manual, strategy=strategy, num_ranks=num_ranks, **fields)


@pytest.mark.parametrize("manual", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_done_to_gradients_gives_the_weights_of_one_process(
    manual: bool, seed: int
) -> None:
    check(case(seed, manual))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("manual", [True, False])
def test_many_programs_give_the_weights_of_one_process(manual: bool, num_ranks: int) -> None:
    for seed in range(6, 36):
        check(case(seed, manual, num_ranks))


class WithLAMB(TwoTower):
    """Is trained by an optimizer of its own."""

    def configure_optimizers(self) -> Any:
        return LAMB(self.parameters(), lr=0.05)


def _resume(path: str) -> list[Any]:
    rank, _ = rank_and_num_ranks()
    states, data = [], loader([pairs(step, rank) for step in range(3)])
    for num_epochs, start in [(2, None), (1, None), (2, path)]:
        model = seeded(WithLAMB)
        options = {"convert_embeddings": "all", "embedding_update": "dense"}
        trainer = make_trainer(options, max_epochs=num_epochs)
        trainer.fit(model, data, ckpt_path=start)
        trainer.save_checkpoint(path)
        states.append(whole_state(model))
    return states


def test_an_optimizer_of_the_user_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    expected, _, resumed = run_on_warm_ranks(_resume, 2, str(tmp_path / "saved.ckpt"))[0]
    assert too_far(resumed, expected, 0.0) == {}
