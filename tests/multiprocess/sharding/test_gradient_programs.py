"""What users do between backward and step gives what it gives in one process: adversarial rows, SAM, repairs, logs."""

from typing import Any

import pytest

from tests.support.click_model import seeded
from tests.support.embedding_models import loader, too_far
from tests.support.gradient_programs import STEPS, GradientProgram, gradient_batch, run_in_one_process
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

TYPES = ["row_wise", "table_wise", "column_wise"]


def _train(seeds: list[int], manual: bool) -> list[Any]:
    rank, _ = rank_and_num_ranks()
    results = []
    for seed in seeds:
        model = seeded(GradientProgram, seed, manual)
        # An optimizer of the user's is taken as it is asked for, and then checked in what it computes.
        update = "dense" if model.attack == "SAM" or model.optimizer == "LAMB" else "auto"
        types = [TYPES[seed % 3]]
        trainer = make_trainer({"convert_embeddings": "all", "sharding_types": types, "embedding_update": update})
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
            for (name, values), (_, expected) in zip(per_rank[rank][number][0], model.logs, strict=True):
                if values != pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True):
                    problems[seed, rank] = model.actions, model.attack, name, values, expected
    assert not problems, "\n".join(map(str, problems.items()))


@pytest.mark.parametrize(("manual", "seeds"), [(True, range(6)), (False, range(6))])
def test_what_is_done_to_gradients_gives_the_weights_of_one_process(manual: bool, seeds: Any) -> None:
    _compare(list(seeds), manual, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("manual", [True, False])
def test_many_programs_over_gradients_give_the_weights_of_one_process(manual: bool, num_ranks: int) -> None:
    _compare(list(range(6, 36)), manual, num_ranks)
