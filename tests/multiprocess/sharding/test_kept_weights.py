"""Weights of tables that the module keeps in a dict or a list too."""

from typing import Any

import torch
from torch import Tensor

from tests.support.click_model import (
    ClickModel,
    largest_difference,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.ranks import run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 0.1})
STEPS = 4


class Keeps(ClickModel):
    """Takes the tables' weights out of a list: for the optimizer, and for a penalty."""

    def _build(self) -> None:
        super()._build()
        bags: Any = self.ebc.embedding_bags
        self.kept = {"tables": [bag.weight for bag in bags.values()]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (
            super().training_step(batch, batch_idx) + 0.01 * self.kept["tables"][0].square().sum()
        )

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.kept["tables"], "lr": 0.05}, {"params": self.mlp.parameters()}]
        return self.optimizer(groups, **self.options)


def _fits_on_a_rank() -> tuple[list[dict[str, Tensor]], bool]:
    model = seeded(Keeps, *SGD)
    states = []
    for _ in range(2):
        _, trainer = train_sharded(
            model, STEPS, {"sharding_types": ["row_wise"], "embedding_update": "dense"}
        )
        states.append(model.final_state)
    trainer.strategy.unshard()
    bags: Any = model.ebc.embedding_bags
    pairs = zip(bags.values(), model.kept["tables"], strict=True)
    return states, all(bag.weight is weight for bag, weight in pairs)


def test_kept_weights_learn_and_are_the_modules_again_after_unshard() -> None:
    once = train_unsharded(seeded(Keeps, *SGD), STEPS, 2)
    twice = train_unsharded(once, STEPS, 2)
    for rank, (states, is_same) in enumerate(run_on_warm_ranks(_fits_on_a_rank, 2)):
        assert is_same
        for state, expected in zip(states if rank == 0 else (), (once, twice), strict=False):
            assert max(largest_difference(state, expected.final_state).values()) < 1e-5
