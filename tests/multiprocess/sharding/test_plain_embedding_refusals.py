"""Plain embeddings that cannot be sharded exactly stay whole with a word, or are refused where they
were asked for."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec import errors
from tests.support.cases import Case, case_of, check, check_refused
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
    "maximum": (bags_maker("max"), "mode='max'"),
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

    def __init__(self, names: Sequence[str] = tuple(WHOLE), sharded: bool = True) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, WHOLE[name][0]())
        if "tied" in names:
            self.output = nn.Linear(DIM, ROWS, bias=False)
            self.output.weight = self.tied.weight
        self.names = names
        if sharded:
            self.item = nn.Embedding(ROWS, DIM)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = []
        for name in (*self.names, *(["item"] if hasattr(self, "item") else [])):
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
    first, second = check(case_of(LeftWhole, tuple(WHOLE), sharded, **fields))
    lines = [line for line in first.warnings if "every rank has all of it" in line]
    assert len(lines) == len(WHOLE), lines
    assert not [line for line in second.warnings if "every rank has all of it" in line]


class ReadsWeight(LeftWhole):
    """Needs the scores of every item, of which each rank has those of its rows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.item(batch) @ self.item.weight.T).square().mean()


class WatchedBags(LeftWhole):
    """A collection whose table has a hook on rank 0."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        table = EmbeddingBagConfig(
            name="bags", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
        )
        self.collection = EmbeddingBagCollection(tables=[table])
        _watch(self.collection.embedding_bags["bags"].weight)


def refused(convert: Any, *names: str, kind: type = LeftWhole) -> Case:
    strategy = {"convert_embeddings": convert}
    return case_of(kind, names, batch=_some_ids, steps=1, strategy=strategy)


def _some_ids(step: int, rank: int) -> Tensor:
    return torch.arange(1, 9) + rank


REFUSED = {
    "watched bags": (
        refused("all", kind=WatchedBags),
        "table 'collection.bags' has gradient hooks",
    ),
    "weight": (refused(["item"], kind=ReadsWeight), "gathered_weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_an_error_of_ours_on_every_rank(name: str) -> None:
    for error in check_refused(*REFUSED[name]):
        assert hasattr(errors, error.split(":")[0])
