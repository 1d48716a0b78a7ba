"""Hooks of `register_hook` on a table's weight: exact element by element, or refused by name."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import Case, case_of, check, check_refused, run_case
from tests.support.ranks import RankFailed

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
        self.hook = hook

    def on_train_start(self) -> None:
        self.items.weight.register_hook(self.hook)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.items(ids).square().sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def ids(step: int, rank: int) -> Tensor:
    return torch.arange(4) + 8 * step + 4 * rank


def case(hook: Any, update: str, cut: str = "row_wise") -> Case:
    strategy = {"embedding_update": update, "sharding_types": [cut]}
    strategy["convert_embeddings"] = ["items"]
    return case_of(Hooked, hook, batch=ids, join=torch.cat, steps=8, strategy=strategy)


@pytest.mark.parametrize(("hook", "update"), [(_half, "dense"), (_half_in_place, "sparse")])
def test_a_hook_that_computes_element_by_element_is_exact(hook: Any, update: str) -> None:
    check(case(hook, update))


def test_a_hook_that_needs_other_ranks_rows_is_refused() -> None:
    check_refused(case(_normalized, "sparse"), REFUSAL)


@pytest.mark.slow  # ranks that failed start anew
def test_so_it_is_where_a_rank_has_no_rows_and_calls_no_hook() -> None:
    # A norm over all ranks would wait for it.
    with pytest.raises(RankFailed, match=re.escape(REFUSAL)):
        run_case(case(_normalized, "sparse", "table_wise"))
