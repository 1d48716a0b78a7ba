"""TorchRec's own test models, drawn at random, train on ranks what they train in one process.

DISTREC_TORCHREC_MODELS is the number of models for each number of ranks, DISTREC_TORCHREC_SEED
where drawing starts. `_compare(drawn_model(seed, in_backward))` runs one of them again.
"""

import os
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.embedding_models import too_far
from tests.support.limits import at_most
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.torchrec_models import (
    DrawnModel,
    TorchRecModel,
    batches_of,
    drawn_model,
    train_in_one_process,
)
from tests.support.trainers import make_trainer

QUICK, ALL = 10, int(os.environ.get("DISTREC_TORCHREC_MODELS", "100"))
SEED = int(os.environ.get("DISTREC_TORCHREC_SEED", "0"))
LIMIT = 1e-5


def _train(drawn: DrawnModel) -> tuple[list[float], dict[str, Any]]:
    rank, num_ranks = rank_and_num_ranks()
    model = TorchRecModel(drawn)
    local = [batches[rank] for batches in batches_of(drawn, num_ranks)]
    make_trainer(model.options).fit(model, DataLoader(local, batch_size=None))  # type: ignore[arg-type]
    return model.losses, model.final_state


def _compare(models: list[DrawnModel], num_ranks: int) -> None:
    calls = {str(model): (_train, model) for model in models}
    per_rank_results = run_each_on_ranks(calls, num_ranks, timeout_seconds=at_most(len(models)))
    problems = []
    for model in models:
        expected = train_in_one_process(model, num_ranks)
        results = [rank_results[str(model)] for rank_results in per_rank_results]
        losses = [
            sum(values) / num_ranks
            for values in zip(*(losses for losses, _ in results), strict=True)
        ]
        far = too_far(results[0][1], expected.final_state, LIMIT)
        if far or losses != pytest.approx(expected.losses, abs=LIMIT):
            problems.append(f"{model}\n{far}\n{losses}\n{expected.losses}")
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("in_backward", [False, True], ids=["configured", "in backward"])
def test_torchrecs_models_train_as_in_one_process(in_backward: bool) -> None:
    # Of 61 and 69, several tables are data_parallel and share one gradient.
    seeds = [SEED + seed for seed in range(QUICK // 2)] + [61, 69] * in_backward
    _compare([drawn_model(seed, in_backward) for seed in seeds], 2)


@pytest.mark.slow
@pytest.mark.timeout(at_most(ALL))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("in_backward", [False, True], ids=["configured", "in backward"])
def test_many_of_torchrecs_models_train_as_in_one_process(
    in_backward: bool, num_ranks: int
) -> None:
    seeds = range(ALL if num_ranks == 2 else ALL // 5)
    _compare([drawn_model(SEED + seed, in_backward) for seed in seeds], num_ranks)
