"""Modules with a loss over an item table, and the plain torch loop that they are compared with."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

ROWS, DIM, HISTORY = 37, 8, 3
Batch = dict[str, Tensor]
Loss = Callable[["Retrieving", Tensor, Batch], Tensor]


class Retrieving(pl.LightningModule):
    """Looks up a history of items, and has a loss over the item table.

    kind: of the table, "embedding", "collection" or "bags". loss: of queries (batch, DIM).
    """

    def __init__(self, kind: str, loss: Loss, optimizer: str, rows: int = ROWS) -> None:
        super().__init__()
        self.kind, self.loss, self.optimizer = kind, loss, optimizer
        names = {"name": "item", "feature_names": ["history"]}
        shape = {"num_embeddings": rows, "embedding_dim": DIM}
        if kind == "embedding":
            self.items: Any = nn.Embedding(rows, DIM)
        elif kind == "collection":
            self.items = EmbeddingCollection(tables=[EmbeddingConfig(**names, **shape)])
        else:
            self.items = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**names, **shape)])
        self.tower = nn.Linear(DIM, DIM)
        self.bias = nn.Parameter(torch.rand(rows))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.losses: list[float] = []
        self.final_state: dict[str, Tensor] = {}

    @property
    def table(self) -> Any:
        """What is passed to the functions."""
        return self.items if self.kind == "embedding" else (self.items, "item")

    @property
    def weight(self) -> Tensor:
        """The whole weight of an unsharded module."""
        return next(self.items.parameters())

    def queries(self, batch: Batch) -> Tensor:
        """Return (batch, DIM)."""
        history = batch["history"]
        if self.kind == "embedding":
            return self.tower(self.items(history).sum(1))
        lengths = torch.full((len(history),), HISTORY, device=history.device)
        looked_up = self.items(KeyedJaggedTensor(["history"], history.flatten(), lengths=lengths))
        if self.kind == "bags":
            return self.tower(looked_up.values())
        return self.tower(looked_up["history"].values().view(-1, HISTORY, DIM).sum(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self, self.queries(batch), batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.3)
        kind = getattr(torch.optim, self.optimizer)
        return kind(self.parameters(), lr=0.02, eps=1e-2)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def make_batch(seed: int, size: int, rows: int = ROWS, ignored: bool = False) -> Batch:
    """Return a batch of histories and targets; some of these are -100 where `ignored`."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, rows, (size,), generator=draw)
    if ignored:
        targets[torch.rand(size, generator=draw) < 0.3] = -100
    return {"history": torch.randint(0, rows, (size, HISTORY), generator=draw), "targets": targets}


def seeded(*args: Any) -> Retrieving:
    """Return a module with the weights that all ranks and the reference share."""
    torch.manual_seed(3)
    return Retrieving(*args)


def strategy_of(kind: str, sharding_type: str, prefix: str = "", **options: Any) -> dict[str, Any]:
    """Return options of a strategy that shards the item table so. prefix: of the model's path."""
    table: dict[str, Any] = {"sharding_types": [sharding_type]}
    if sharding_type == "column_wise":
        table["min_partition"] = 4
    name = "items" if kind == "embedding" else "items.item"
    return {"tables": {prefix + name: table}, "convert_embeddings": "all"} | options


def train(
    model: Retrieving, batches: list[list[Batch]], strategy: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Train on this rank. batches: step -> rank -> batch. Returns the state and losses."""
    own = [ranks[rank_and_num_ranks()[0]] for ranks in batches]
    make_trainer(strategy, **options).fit(model, DataLoader(own, batch_size=None))
    return {"state": model.final_state, "losses": model.losses}


def train_plain(model: Retrieving, batches: list[list[Batch]], accumulate: int = 1) -> Retrieving:
    """Train by a plain loop on the batches of all ranks together."""
    optimizer = model.configure_optimizers()
    for step, ranks in enumerate(batches):
        joined = {key: torch.cat([batch[key] for batch in ranks]) for key in ranks[0]}
        (model.training_step(joined, step) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def differences(actual: dict[str, Tensor], expected: nn.Module) -> dict[str, float]:
    """Return the largest difference of each weight."""
    state = expected.state_dict()
    assert sorted(actual) == sorted(state)
    return {key: float((actual[key].cpu() - value).abs().max()) for key, value in state.items()}
