"""Ranks whose rates, weights or layers drift apart are told within a few steps; what is alike on
all ranks goes on."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from lightning_distrec.errors import OptimizerError, UnsupportedError
from tests.support.dense_models import WIDTH, Recording, loader, whole_batches
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": lambda: TunedFSDPStrategy(min_num_parameters=8),
    "two replicas": lambda: TunedFSDPStrategy(min_num_parameters=8, replicas=2),
    "torchrec_sharded": lambda: TorchRecShardedStrategy(
        convert_embeddings="all", sharding_types=["row_wise"]
    ),
    "pipeline_parallel": lambda: PipelineParallelStrategy(microbatches=2),
}
FIRST = 6  # of the second epoch


class Model(Recording):
    """Rows of a table and two layers; `fault` is what happens before the second epoch, or in each
    step of it."""

    def __init__(self, fault: str = "", **embedding: Any) -> None:
        super().__init__()
        self.fault = fault
        self.table = nn.Embedding(8, WIDTH, **embedding)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.free = [nn.Parameter(torch.ones(1))] if fault == "no attribute" else []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs + self.table((inputs[:, 0] > 0).long()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.free], lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer, rank = self.trainer.optimizers[0], self.global_rank
        begins = self.trainer.global_step == FIRST
        if self.fault == "last rate":
            begins = self.trainer.global_step == FIRST - 1
        if self.fault == "loss" and self.trainer.global_step > FIRST:
            optimizer.param_groups[0]["lr"] = self.losses[-1]
        elif not begins:
            return
        elif self.fault == "alike":
            optimizer.param_groups[0]["lr"] *= 0.5
        elif self.fault in ("rate", "last rate") and rank == 0:
            optimizer.param_groups[0]["lr"] = 0.05
        elif self.fault == "decay" and rank == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        elif self.fault == "optimizer" and rank == 0:
            self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), lr=0.1)]
        elif self.fault == "weight" and rank == 1:
            weight = self.net[2].weight.data
            (weight.to_local() if isinstance(weight, DTensor) else weight).add_(
                torch.tensor([1.0, -1.0] * 4)
            )
        elif self.fault == "layer":
            torch.manual_seed(4)
            self.net[2] = nn.Linear(8, 1)
            optimizer.add_param_group({"params": list(self.net[2].parameters())})


def _fit(
    strategy: str, fault: str, embedding: dict[str, Any] | None = None
) -> tuple[str, int, float]:
    """Return the error, the number of steps before it, and a number of the trained weights."""
    rank, num_ranks = rank_and_num_ranks()
    pl.seed_everything(5)
    model = Model(fault, **(embedding or {}))
    data = whole_batches(2) if strategy == "pipeline_parallel" else loader(rank, num_ranks)
    settings = DEFAULTS | {"max_epochs": 1 if fault == "last rate" else 3}
    trainer = pl.Trainer(strategy=STRATEGIES[strategy](), devices=num_ranks, **settings)
    try:
        trainer.fit(model, data)
    except (OptimizerError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}", trainer.global_step, 0.0
    return "", trainer.global_step, float(model.net[2].weight.detach().sum())


RATE = r"OptimizerError: 'lr' of param group 0 .* after \d+ steps: it is 0\.05 on rank 0 and 0\.1 on rank 1\. Causes: "
LAYER = r"OptimizerError: an optimizer has 'net\.2\.weight' of shape \(1, 8\), which was not in the module at set-up"
WEIGHT = r"OptimizerError: a projection of 'net\.2\.weight.*' is no longer the same on all ranks after \d+ steps: it is"
FAULTS: dict[tuple[str, str], tuple[str, int]] = {
    **{(strategy, "rate"): (RATE, FIRST + 3) for strategy in STRATEGIES},
    ("torchrec_sharded", "loss"): (
        r"OptimizerError: .*'lr' of .* each rank logs by itself .set sync_dist",
        FIRST + 4,
    ),
    ("ddp_tuned", "last rate"): (RATE, FIRST),
    ("fsdp_tuned", "decay"): (
        r"OptimizerError: .*'weight_decay' of .* and 0\.5 on rank 1\.",
        FIRST + 3,
    ),
    ("ddp_tuned", "optimizer"): (
        "OptimizerError: how many numbers .* a callback has replaced",
        FIRST + 3,
    ),
    ("ddp_tuned", "weight"): (WEIGHT, 10),
    ("two replicas", "weight"): (WEIGHT, 10),
    ("ddp_tuned", "layer"): (LAYER, FIRST + 1),
    ("ddp_tuned", "no attribute"): (
        r"OptimizerError: an optimizer has 'a parameter' of shape \(1,\), which was not",
        0,
    ),
}
LOCAL: dict[str, tuple[dict[str, Any], str]] = {
    "norm": (
        {"max_norm": 1.0},
        r"UnsupportedError: 'table' has max_norm=1\.0 .* NormalizeRows\(\['table\.weight'\]",
    ),
    "counts": (
        {"scale_grad_by_freq": True},
        "UnsupportedError: 'table' has .* scale_grad_by_freq=True: each rank",
    ),
}
# The batches of a pipeline are those of all of its ranks, which shorten no other rows.
REFUSED = [("ddp_tuned", "norm"), ("fsdp_tuned", "norm"), ("torchrec_sharded", "norm")]
REFUSED += [("ddp_tuned", "counts"), ("pipeline_parallel", "counts")]


def test_what_drifts_apart_is_told_on_every_rank_and_what_changes_alike_goes_on() -> None:
    calls: dict[str, tuple[Any, ...]] = {str(case): (_fit, *case) for case in FAULTS}
    calls |= {str((s, f)): (_fit, s, "", LOCAL[f][0]) for s, f in REFUSED}
    pl.seed_everything(5)
    model = Model("alike")
    pl.Trainer(**(DEFAULTS | {"max_epochs": 3})).fit(model, whole_batches(2))
    total = float(model.net[2].weight.detach().sum())
    for rank in run_each_on_ranks(calls | {"alike": (_fit, "ddp_tuned", "alike")}, 2):
        for case, (pattern, most_steps) in FAULTS.items():
            message, num_steps, _ = rank[str(case)]
            assert re.match(pattern, message), (case, message)
            assert num_steps <= most_steps
        for case in REFUSED:
            message, num_steps, _ = rank[str(case)]
            assert re.match(LOCAL[case[1]][1], message), (case, message)
            assert num_steps == 0
        assert rank["alike"] == ("", 18, pytest.approx(total, abs=1e-6))
