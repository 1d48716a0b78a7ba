"""Random programs over one embedding's weight train as in one process: losses, the weight, and the
layers around it."""

from typing import Any

import pytest

from lightning_distrec.errors import ShardedWeightError
from tests.support.click_model import seeded
from tests.support.embedding_models import loader, too_far, whole_state
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer
from tests.support.weight_programs import STEPS, WeightProgram, program_batch, run_in_one_process

TYPES = ["row_wise", "column_wise", "table_wise"]


def _train(seeds: list[int], is_gathered: bool) -> list[Any]:
    rank, _ = rank_and_num_ranks()
    results = []
    for seed in seeds:
        model = seeded(WeightProgram, seed, is_gathered)
        options = (
            {"tables": {"table": {"gathered_weight": True}}}
            if is_gathered
            else {"embedding_update": "dense"}
        )
        trainer = make_trainer({
            "convert_embeddings": ["table"],
            "sharding_types": [TYPES[seed % 3]],
            **options,
        })
        trainer.fit(model, loader([program_batch(step, rank) for step in range(STEPS)]))
        results.append((model.losses, whole_state(model)))
    return results


def _compare(seeds: list[int], is_gathered: bool, num_ranks: int) -> None:
    per_rank = run_on_warm_ranks(_train, num_ranks, seeds, is_gathered)
    problems = {}
    for number, seed in enumerate(seeds):
        model = seeded(WeightProgram, seed, is_gathered)
        losses = run_in_one_process(model, num_ranks)
        for rank in range(num_ranks):
            expected = [step_losses[rank] for step_losses in losses]
            if per_rank[rank][number][0] != pytest.approx(expected, rel=2e-4, abs=2e-5):
                problems[seed, rank] = model.steps, model.terms, per_rank[rank][number][0], expected
        if far := too_far(per_rank[0][number][1], model.state_dict(), 5e-5):
            problems[seed, "state"] = model.steps, model.terms, model.writes, model.optimizer, far
    assert not problems, "\n".join(map(str, problems.items()))


@pytest.mark.parametrize(("is_gathered", "seeds"), [(True, range(3)), (False, range(3))])
def test_programs_over_a_weight_train_as_in_one_process(is_gathered: bool, seeds: Any) -> None:
    _compare(list(seeds), is_gathered, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_many_programs_over_a_weight_train_as_in_one_process(
    is_gathered: bool, num_ranks: int
) -> None:
    _compare(list(range(6, 36)), is_gathered, num_ranks)


def test_a_tensor_that_differs_between_ranks_is_refused_on_shards() -> None:
    for message in run_on_warm_ranks(_mixes_batch, 2):
        assert "with a tensor that differs between the ranks" in message
        assert "gathered_weight" in message


def _mixes_batch() -> str:
    rank, _ = rank_and_num_ranks()
    model = seeded(WeightProgram, 0, False)
    model.training_step = lambda batch, batch_idx: (model.table.weight * batch["noise"]).sum()  # type: ignore[method-assign]
    trainer = make_trainer({"convert_embeddings": ["table"], "embedding_update": "dense"})
    with pytest.raises(ShardedWeightError) as refused:
        trainer.fit(model, loader([program_batch(0, rank)]))
    return str(refused.value)
