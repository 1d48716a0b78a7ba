"""Whatever changes a learning rate, fused tables use it from the very step on at which the user's
optimizer does."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_distrec.errors import OptimizerError
from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.embedding_models import whole_state
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS_PER_EPOCH, EPOCHS = 5, 3


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


def _train(schedule: str) -> dict[str, Tensor]:
    model = seeded(ScheduledModel, schedule)
    make_trainer(max_epochs=EPOCHS).fit(
        model, rank_loader(STEPS_PER_EPOCH, rank_and_num_ranks()[0])
    )
    return model.final_state


@pytest.mark.parametrize("schedule", ["step", "warm-up", "epoch", "plateau"])
def test_schedules_reach_fused_tables_before_the_forward_that_uses_them(schedule: str) -> None:
    actual = run_on_warm_ranks(_train, 2, schedule)[0]
    model = seeded(ScheduledModel, schedule)
    optimizer, scheduler = model.optimizer_and_scheduler()
    for _epoch in range(EPOCHS):
        for step in range(STEPS_PER_EPOCH):
            optimizer.zero_grad()
            model.training_step(
                join_batches([make_batch(1000 * step + rank) for rank in range(2)]), step
            ).backward()
            optimizer.step()
            if schedule in ("step", "warm-up"):
                scheduler.step()
        if schedule == "epoch":
            scheduler.step()
        elif schedule == "plateau":
            # patience 0 and an unreachable threshold: every epoch after the first halves the rate
            scheduler.step(0.0)
    assert max(largest_difference(actual, model.state_dict()).values()) <= 1e-6


class DecayAddedLater(ClickModel):
    """Changes a hyperparameter that a fused update does not follow."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1


def _train_with_decay_added_later() -> None:
    model = seeded(DecayAddedLater, torch.optim.SGD, {"lr": 1.0})
    make_trainer().fit(model, rank_loader(5, rank_and_num_ranks()[0]))


def test_a_hyperparameter_that_changes_while_training_is_reported() -> None:
    with pytest.raises(
        RankFailed, match=f"{OptimizerError.__name__}: table 'ebc.*weight_decay=0.1"
    ):
        run_on_warm_ranks(_train_with_decay_added_later, 2)


class RateOfTheStep(pl.LightningModule):
    """Sets its rate inside of the step, before it looks up; its one table is on one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(30, 8)
        self.layer = nn.Linear(8, 1)
        self.final_state: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0 / (1 + batch_idx)
        return self.layer(self.table(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def _train_with_rates_of_steps(depth: int) -> dict[str, Tensor]:
    options = {
        "prefetch": {"depth": depth},
        "convert_embeddings": "all",
        "sharding_types": ["table_wise"],
    }
    model, rank = RateOfTheStep(), rank_and_num_ranks()[0]
    ids = [torch.arange(4) + 7 * step + rank for step in range(3)] * 2
    make_trainer(options).fit(model, DataLoader(ids, batch_size=None))
    return model.final_state


def test_a_rate_that_is_set_inside_of_the_step_is_used_in_it_also_where_only_one_rank_has_rows() -> (
    None
):
    plain = run_on_warm_ranks(_train_with_rates_of_steps, 2, 1)[0]
    ahead = run_on_warm_ranks(_train_with_rates_of_steps, 2, 3)[0]
    assert all(torch.equal(plain[name], ahead[name]) for name in plain)
    reference = RateOfTheStep()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1.0 / (1 + step)
        ids = torch.cat([torch.arange(4) + 7 * (step % 3) + rank for rank in range(2)])
        optimizer.zero_grad()
        reference.layer(reference.table(ids)).square().mean().backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(plain[name], value, atol=1e-6, rtol=0, msg=name)
