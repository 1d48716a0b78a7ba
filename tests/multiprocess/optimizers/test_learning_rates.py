"""Whatever changes a learning rate, fused tables use it from the very step on at which the user's
optimizer does."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

from tests.support.cases import case_of, check, concatenate
from tests.support.click_model import ClickModel


class ScheduledModel(ClickModel):
    """Tables and the rest in groups of their own, each with its own rate."""

    def __init__(self, schedule: str) -> None:
        super().__init__(torch.optim.SGD, {"lr": 1.0})
        self.schedule = schedule

    def optimizer_and_scheduler(self) -> tuple[Any, Any]:
        tables = dict(self.ebc.named_parameters())
        groups = [
            {"params": [p for name, p in tables.items() if "wide" in name], "lr": 2.0},
            {"params": [p for name, p in tables.items() if "wide" not in name], "lr": 1.0},
            {"params": self.mlp.parameters(), "lr": 0.1},
        ]
        optimizer = torch.optim.SGD(groups)
        if self.schedule == "step":
            return optimizer, ExponentialLR(optimizer, 0.8)
        if self.schedule == "warm-up":
            return optimizer, LambdaLR(
                optimizer, [lambda step, n=n: min(1.0, (step + 1) / n) for n in (4, 6, 8)]
            )
        if self.schedule == "epoch":
            return optimizer, ExponentialLR(optimizer, 0.3)
        return optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.optimizer_and_scheduler()
        interval = "step" if self.schedule in ("step", "warm-up") else "epoch"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "monitor": "loss"},
        }


class RateOfTheStep(pl.LightningModule):
    """Sets its rate inside of the step, before it looks up; its one table is on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0 / (1 + batch_idx)
        return self.layer(self.table(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batch_of_ids(step: int, rank: int) -> Tensor:
    return torch.arange(4) + 7 * (step % 3) + rank


CASES = {
    **{
        schedule: case_of(ScheduledModel, schedule=schedule, steps=5, trainer={"max_epochs": 3})
        for schedule in ("warm-up", "plateau")
    },
    "in the step, prefetched": case_of(
        RateOfTheStep,
        batch=batch_of_ids,
        join=concatenate,
        strategy={"convert_embeddings": "all", "sharding_types": ["table_wise"]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_reach_fused_tables_before_the_forward_that_uses_them(name: str) -> None:
    check(CASES[name])
