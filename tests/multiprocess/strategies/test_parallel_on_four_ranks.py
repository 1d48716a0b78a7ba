"""Four ranks that recompute, compress or gather in other types have the losses and weights of one
process."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from tests.multiprocess.strategies.test_powersgd import POWERSGD, _by_hand, _with_equal_draws
from tests.multiprocess.strategies.test_powersgd import _fit as _fit_powersgd
from tests.support.dense_models import WIDTH, Recording, loader, whole_batches
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

NUM_RANKS = 4
SETTINGS = DEFAULTS | {"max_epochs": 2, "gradient_clip_val": 0.5}
Outcome = tuple[list[float], dict[str, Tensor]]
STRATEGIES: dict[str, Any] = {"ddp": TunedDDPStrategy, "fsdp": TunedFSDPStrategy}
SMALL = {"min_num_parameters": 8}


class Blocks(Recording):
    """Blocks of a kind, each example for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.out(inputs)


CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "ddp, layers recompute": ("ddp", {"activation_checkpointing": ["blocks.0", "blocks.2"]}, 1e-5),
    "ddp, gradients in bf16": ("ddp", {"comm_dtype": "bf16"}, 2e-2),
    "fsdp, blocks recompute": ("fsdp", SMALL | {"activation_checkpointing": True}, 1e-5),
    "fsdp, two replicas that recompute": (
        "fsdp",
        SMALL | {"activation_checkpointing": True, "replicas": 2},
        1e-5,
    ),
    "fsdp, blocks in bf16": ("fsdp", SMALL | {"param_dtype": "bf16"}, 2e-2),
    "fsdp, two replicas, gradients in bf16": (
        "fsdp",
        SMALL | {"replicas": 2, "reduce_dtype": "bf16"},
        2e-2,
    ),
}
"""Case -> the strategy, its options, and how far numbers may be from those of one process."""


def _fit(strategy: str, options: dict[str, Any], _: float) -> Outcome:
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    model = Blocks()
    trainer = pl.Trainer(strategy=STRATEGIES[strategy](**options), devices=num_ranks, **SETTINGS)
    trainer.fit(model, loader(rank, num_ranks))
    whole = model.state_dict() if strategy == "ddp" else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return model.losses, {name: value.clone() for name, value in whole.items()}


def _alone() -> Outcome:
    pl.seed_everything(5)
    model = Blocks()
    pl.Trainer(**SETTINGS).fit(model, whole_batches(NUM_RANKS))
    return model.losses, model.state_dict()


@pytest.mark.slow
def test_numbers_are_those_of_one_process() -> None:
    calls: dict[str, tuple[Any, ...]] = {
        case: (_fit, *arguments) for case, arguments in CASES.items()
    }
    # One bucket in both, from the first step on: orthogonalizing amplifies the rounding of sums,
    # whose order depends on where in a bucket a gradient is.
    powersgd: dict[str, tuple[Any, ...]] = {
        "powersgd": (
            _with_equal_draws,
            partial(_fit_powersgd, options={"powersgd": POWERSGD | {"start_step": 0}}),
        ),
        "by torch's hook": (_with_equal_draws, partial(_by_hand, 0)),
    }
    per_rank = run_each_on_ranks(calls | powersgd, NUM_RANKS)
    losses, weights = _alone()
    for case, (*_, most) in CASES.items():
        means = [
            sum(step) / NUM_RANKS
            for step in zip(*(rank_results[case][0] for rank_results in per_rank), strict=True)
        ]
        assert means == pytest.approx(losses, abs=most), case
        for name, value in weights.items():
            torch.testing.assert_close(
                per_rank[0][case][1][name], value, atol=most, rtol=most, msg=f"{case}: {name}"
            )
    for rank_results in per_rank:
        assert rank_results["powersgd"][0] == pytest.approx(
            rank_results["by torch's hook"][0], abs=1e-6
        )
