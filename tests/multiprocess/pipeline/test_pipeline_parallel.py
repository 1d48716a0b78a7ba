"""`pipeline_parallel` has the numbers of one process, however the chain is cut and whatever the
schedule."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_distrec import PipelineParallelStrategy
from tests.support.chain_models import CHAINS
from tests.support.dense_models import whole_batches
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

Outcome = tuple[list[float], list[float], dict[str, Tensor]]


def _fit(kind: str, options: dict[str, Any], settings: dict[str, Any]) -> Outcome:
    pl.seed_everything(5)
    model = CHAINS[kind]()
    _, num_ranks = rank_and_num_ranks()
    trainer = pl.Trainer(
        strategy=PipelineParallelStrategy(**options), devices=num_ranks, **_settings(settings)
    )
    trainer.fit(model)
    strategy: Any = trainer.strategy
    state = strategy.full_state_dict()
    return model.losses, model.validated, {name: value.clone() for name, value in state.items()}


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    return DEFAULTS | {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 2} | settings


def _fit_one_process(kind: str, settings: dict[str, Any], num_replicas: int) -> Outcome:
    pl.seed_everything(5)
    model = CHAINS[kind]()
    trainer = pl.Trainer(**_settings(settings))
    trainer.fit(model, whole_batches(num_replicas), whole_batches(num_replicas))
    return model.losses, model.validated, model.state_dict()


CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
CASES: dict[str, tuple[Any, ...]] = {
    "clipped and accumulated": (_fit, "Sequence", {"microbatches": 2}, CLIPPED),
    "1f1b": (_fit, "Transformer", {"schedule": "1f1b"}, CLIPPED),
    "metrics of micro-batches": (_fit, "Measured", {"schedule": "1f1b"}, {}),
    "interleaved": (_fit, "Transformer", INTERLEAVED, {}),
    "arguments of examples": (_fit, "PerExample", {"microbatches": 2}, {}),
    "outputs that are views": (_fit, "Permuted", {"split": ["model.1"]}, {}),
    "called layers": (
        _fit,
        "Called",
        {"chain": "net", "split": ["net.fc2"], "microbatches": 2},
        CLIPPED,
    ),
}
FURTHER_CASES: dict[str, tuple[Any, ...]] = {
    "one micro-batch": (_fit, "Sequence", {"microbatches": 1, "split": ["model.5"]}, {}),
    "batches that three do not divide": (
        _fit,
        "Sequence",
        {"microbatches": 3, "schedule": "1f1b"},
        {},
    ),
    "called layers of the module itself": (_fit, "Flat", {"chain": "", "schedule": "1f1b"}, {}),
    "called layers, interleaved": (_fit, "Called", INTERLEAVED | {"chain": "net"}, {}),
    "64 bits": (_fit, "Sequence", {"schedule": "1f1b"}, {"precision": "64-true"}),
}
FOUR_RANKS: dict[str, tuple[Any, ...]] = {
    "four stages": (_fit, "Transformer", {}, CLIPPED),
    "two replicas": (_fit, "Transformer", {"stages": 2, "microbatches": 2}, CLIPPED),
    "metrics of two replicas": (_fit, "Measured", {"stages": 2}, {}),
}


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(2, CASES, id="two ranks"),
        pytest.param(2, FURTHER_CASES, id="two ranks, more", marks=pytest.mark.slow),
        pytest.param(4, FOUR_RANKS, id="four ranks", marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_those_of_one_process(
    num_ranks: int, cases: dict[str, tuple[Any, ...]]
) -> None:
    per_rank_results = run_each_on_ranks(cases, num_ranks)
    for case, (_, kind, options, settings) in cases.items():
        print(case)
        results: list[Outcome] = [rank_results[case] for rank_results in per_rank_results]
        pipeline_size = options.get("stages", num_ranks)
        num_replicas = num_ranks // pipeline_size
        losses, validated, weights = _fit_one_process(kind, settings, num_replicas)
        for rank, result in enumerate(results):
            assert result[:2] == results[rank - rank % pipeline_size][:2]
        tolerance = 1e-12 if settings.get("precision") == "64-true" else 1e-5
        for index, expected in enumerate((losses, validated)):
            replicas = [result[index] for result in results[::pipeline_size]]
            means = [sum(values) / num_replicas for values in zip(*replicas, strict=True)]
            assert means == pytest.approx(expected, abs=tolerance)
        full_state = results[0][2]
        assert list(full_state) == list(weights)
        for name, value in weights.items():
            torch.testing.assert_close(
                full_state[name], value, atol=1e-5, rtol=1e-5, msg=f"{case}: {name}"
            )
