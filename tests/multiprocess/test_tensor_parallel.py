"""Layers that `fsdp_tuned(tensor_parallel=...)` splits have the numbers of one process."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_distrec import TunedFSDPStrategy
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.split_models import PLANS, seeded
from tests.support.trainers import DEFAULTS

Outcome = tuple[dict[str, list[float]], dict[str, Tensor]]
"""What a run has logged, and weights."""
SMALL = {"min_num_parameters": 8}
DOUBLE = {"precision": "64-true"}


def _fit(kind: str, strategy: Any, settings: dict[str, Any], num_ranks: int) -> Outcome:
    model = seeded(kind)
    options = DEFAULTS | {"max_epochs": 2, "limit_val_batches": 2, **settings}
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **options)
    trainer.fit(model)
    is_ours = isinstance(strategy, TunedFSDPStrategy)
    whole = trainer.strategy.full_state_dict() if is_ours else model.state_dict()
    logged = {"losses": model.losses, "sums": model.sums, "validated": model.validated}
    return logged, {name: value.clone() for name, value in whole.items()}


def _split(kind: str, settings: dict[str, Any], **options: Any) -> Outcome:
    parallel = {"size": 2, "plan": PLANS[kind]} | options.pop("tensor_parallel", {})
    strategy = TunedFSDPStrategy(**{"tensor_parallel": parallel, "min_num_parameters": 8, **options})
    return _fit(kind, strategy, settings, rank_and_num_ranks()[1])


def _check_same(ours: Outcome, alone: Outcome, case: str, most: float) -> None:
    for name, values in alone[0].items():
        assert values, name
        within = max(most, 1e-6) if name == "sums" else most  # a metric is of 32 bits
        assert ours[0][name] == pytest.approx(values, rel=within, abs=within), f"{case}: {name}"
    assert ours[1].keys() == alone[1].keys()
    for name, value in alone[1].items():
        torch.testing.assert_close(ours[1][name], value, atol=most, rtol=most, msg=f"{case}: {name}")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "perceptron": ("Perceptron", DOUBLE),
    "transformer": ("SmallGPT", DOUBLE),
    "dropout": ("Dropping", DOUBLE),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_losses_sums_and_weights_are_those_of_one_process(num_ranks: int) -> None:
    cases = {n: c for n, c in CASES.items() if num_ranks == 2 or n == "transformer"}
    first, *_ = run_each_on_ranks({name: (_split, *case) for name, case in cases.items()}, num_ranks)
    for name, (kind, settings) in cases.items():
        _check_same(first[name], _fit(kind, "auto", settings, 1), name, 1e-9)
