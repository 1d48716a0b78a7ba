"""Plain embeddings that cannot be sharded exactly stay whole with a word, or are refused where they
were asked for."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from tests.support.cases import case_of, check, check_refused
from tests.support.embedding_calls import DIM, ROWS, Embedding, bags_maker, rows_maker


class MyEmbedding(nn.Embedding):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _watch(weight: nn.Parameter) -> None:
    """Register a hook as wandb's watch does, which Lightning calls on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        weight.register_hook(lambda gradient: None)


def _watched() -> nn.Embedding:
    embedding = nn.Embedding(ROWS, DIM)
    _watch(embedding.weight)
    return embedding


WHOLE: dict[str, tuple[Callable[[], Embedding], str]] = {
    "maximum": (bags_maker("max"), "mode='max' has no FBGEMM kernel"),
    "narrow": (lambda: nn.Embedding(ROWS, 6), "embedding_dim=6"),
    "mine": (lambda: MyEmbedding(ROWS, DIM), "MyEmbedding is a subclass"),
    "tied": (rows_maker(), "output.weight"),
    "watched": (
        _watched,
        "For wandb's watch, set log='parameters'",
    ),
}


class LeftWhole(pl.LightningModule):
    """Embeddings that cannot be sharded exactly, and one that can; `tied` gives its weight to an
    output layer."""

    def __init__(self, sharded: bool = True) -> None:
        super().__init__()
        self.names = list(WHOLE)
        for name, (make, _) in WHOLE.items():
            self.add_module(name, make())
        self.output = nn.Linear(DIM, ROWS, bias=False)
        self.output.weight = self.tied.weight
        if sharded:
            self.names.append("item")
            self.item = nn.Embedding(ROWS, DIM)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = []
        for name in self.names:
            table = getattr(self, name)
            rows = table(batch.unsqueeze(1)) if isinstance(table, nn.EmbeddingBag) else table(batch)
            losses.append(((self.output(rows) if name == "tied" else rows) - 1).pow(2).mean())
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _whole_batch(step: int, rank: int) -> Tensor:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
    return order[8 * rank : 8 * rank + 8]


@pytest.mark.parametrize("sharded", [True, False])
def test_what_stays_whole_is_reported_once_by_rank_zero_and_trains_exactly(sharded: bool) -> None:
    words = [reason for _, reason in WHOLE.values()]
    told = (*words, *(f"'{name}' is not sharded" for name in WHOLE))
    fields = {"batch": _whole_batch, "steps": 3, "strategy": {"convert_embeddings": "all"}}
    fields |= {"told": told, "updates": {"item": "fused"} if sharded else {}}
    first, second = check(case_of(LeftWhole, sharded, **fields))
    lines = [line for line in first.warnings if "every rank has all of it" in line]
    assert len(lines) == len(WHOLE), lines
    assert not [line for line in second.warnings if "every rank has all of it" in line]


class WatchedBags(LeftWhole):
    """A collection whose table has a hook on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="bags", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
        )
        self.collection = EmbeddingBagCollection(tables=[table])
        _watch(self.collection.embedding_bags["bags"].weight)


def test_a_hook_on_a_collections_table_is_an_error_on_every_rank() -> None:
    strategy = {"convert_embeddings": "all"}
    case = case_of(WatchedBags, batch=_whole_batch, steps=1, strategy=strategy)
    check_refused(case, "the weight of table 'collection.bags' has gradient hooks")
