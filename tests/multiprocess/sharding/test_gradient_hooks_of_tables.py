"""Hooks of `register_hook` on a table's weight: exact element by element, or refused by name."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec.errors import ShardedWeightError
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

IDS = torch.arange(64).reshape(8, 8)
"""(num_steps, num_examples)."""
REFUSAL = "the hooked gradient of the sharded table 'items' was read (norm)"


def _half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _half_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def _normalized(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


class Hooked(pl.LightningModule):
    """Registers a hook once training has begun."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.items = nn.Embedding(64, 8)
        with torch.no_grad():
            self.items.weight.copy_(torch.arange(512.0).reshape(64, 8) / 512)
        self.hook = hook

    def on_train_start(self) -> None:
        self.items.weight.register_hook(self.hook)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.items(ids).square().sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(hook: Callable[[Tensor], Tensor | None], options: dict[str, Any]) -> Tensor | str:
    rank, num_ranks = rank_and_num_ranks()
    module = Hooked(hook)
    trainer = make_trainer({"convert_embeddings": ["items"]} | options)
    batches = list(IDS.chunk(num_ranks, 1)[rank])
    try:
        trainer.fit(module, DataLoader(batches, None))
    except ShardedWeightError as error:
        return str(error)
    return trainer.strategy.full_parameter("items.weight")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("hook", "update"), [(_half, "dense"), (_half_in_place, "sparse")])
def test_a_hook_that_computes_element_by_element_is_exact(
    hook: Callable[[Tensor], Tensor | None], update: str
) -> None:
    plain = Hooked(hook)
    trainer = pl.Trainer(strategy="auto", devices=1, **DEFAULTS)
    trainer.fit(plain, DataLoader(list(IDS), None))
    for weight in run_on_warm_ranks(_fit, 2, hook, {"embedding_update": update}):
        torch.testing.assert_close(weight, plain.items.weight.detach())


def test_a_hook_that_needs_other_ranks_rows_is_refused() -> None:
    options = {"embedding_update": "sparse", "sharding_types": ["row_wise"]}
    for message in run_on_warm_ranks(_fit, 2, _normalized, options):
        assert REFUSAL in message


@pytest.mark.slow  # ranks that failed start anew
def test_so_it_is_where_a_rank_has_no_rows_and_calls_no_hook() -> None:
    # A norm over all ranks would wait for it.
    options = {"embedding_update": "sparse", "sharding_types": ["table_wise"]}
    with pytest.raises(RankFailed, match=re.escape(REFUSAL)):
        run_on_warm_ranks(_fit, 2, _normalized, options)
