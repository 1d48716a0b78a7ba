"""What users do between backward and step gives what it gives in one process: adversarial rows,
SAM, repairs, logs."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, loader, pairs, too_far, whole_state
from tests.support.gradient_programs import (
    LAMB,
    STEPS,
    GradientProgram,
    gradient_batch,
    run_in_one_process,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

TYPES = ["row_wise", "table_wise", "column_wise"]


def _train(seeds: list[int], manual: bool) -> list[Any]:
    rank, _ = rank_and_num_ranks()
    results = []
    for seed in seeds:
        model = seeded(GradientProgram, seed, manual)
        # An optimizer of the user's is taken as it is asked for, and then checked in what it
        # computes.
        update = "dense" if model.attack == "SAM" or model.optimizer == "LAMB" else "auto"
        types = [TYPES[seed % 3]]
        trainer = make_trainer({
            "convert_embeddings": "all",
            "sharding_types": types,
            "embedding_update": update,
        })
        trainer.fit(model, loader([gradient_batch(step, rank) for step in range(STEPS)]))
        results.append((model.logs, model.final_state))
    return results


def _compare(seeds: list[int], manual: bool, num_ranks: int) -> None:
    per_rank = run_on_warm_ranks(_train, num_ranks, seeds, manual)
    problems = {}
    for number, seed in enumerate(seeds):
        model = seeded(GradientProgram, seed, manual)
        run_in_one_process(model, num_ranks)
        if far := too_far(per_rank[0][number][1], model.state_dict(), 2e-5):
            problems[seed, "state"] = model.actions, model.attack, model.optimizer, model.hook, far
        for rank in range(num_ranks):
            for (name, values), (_, expected) in zip(
                per_rank[rank][number][0], model.logs, strict=True
            ):
                if values != pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True):
                    problems[seed, rank] = model.actions, model.attack, name, values, expected
    assert not problems, "\n".join(map(str, problems.items()))


@pytest.mark.parametrize(("manual", "seeds"), [(True, range(3)), (False, range(3))])
def test_what_is_done_to_gradients_gives_the_weights_of_one_process(
    manual: bool, seeds: Any
) -> None:
    _compare(list(seeds), manual, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("manual", [True, False])
def test_many_programs_over_gradients_give_the_weights_of_one_process(
    manual: bool, num_ranks: int
) -> None:
    _compare(list(range(6, 36)), manual, num_ranks)


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
