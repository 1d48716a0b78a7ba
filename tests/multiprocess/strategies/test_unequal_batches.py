"""Ranks with batches of unequal sizes: what is logged is that of one process, and what is not exact
is told."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "torchrec_sharded": TorchRecShardedStrategy,
}
PARTS = (slice(0, 1), slice(1, 4))
"""The examples that each rank has of the four in a batch."""


class Logs(pl.LightningModule):
    """Logs means of its examples, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps: list[float] = []

    def _log(self, kind: str, batch: Tensor) -> Tensor:
        for name, value in (("mean", batch.mean()), ("max", batch.max())):
            options = {"on_step": True, "on_epoch": True, "sync_dist": True, "reduce_fx": name}
            self.log(f"{kind} {name}", value, batch_size=len(batch), **options)
        return self.layer(batch).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._log("train", batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(float(self.trainer.callback_metrics["train mean_step"]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._log("val", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _logged(strategy: str) -> tuple[list[float], dict[str, float]]:
    """Return what was logged in the steps of training, and at the end."""
    rank, num_ranks = (0, 1) if strategy == "auto" else rank_and_num_ranks()
    part = slice(None) if num_ranks == 1 else PARTS[rank]
    batches: Any = [batch[part] for batch in torch.arange(12.0).square().reshape(3, 4, 1)]
    data = DataLoader(batches, batch_size=None)
    model, chosen = Logs(), STRATEGIES[strategy]() if num_ranks > 1 else "auto"
    trainer = pl.Trainer(strategy=chosen, devices=num_ranks, **DEFAULTS)
    trainer.fit(model, data, data)
    return model.steps, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_reduced_values_are_those_of_all_examples() -> None:
    steps, last = _logged("auto")
    assert last["val mean_epoch"] == pytest.approx(sum(number**2 for number in range(12)) / 12)
    logged = run_each_on_ranks({name: (_logged, name) for name in STRATEGIES}, 2)[0]
    for name in STRATEGIES:
        assert logged[name] == (pytest.approx(steps), pytest.approx(last)), name


TEXT = (
    "the ranks' batches are of unequal sizes, (1, 3) in step 1, and no lookup shows numbers of "
    "examples"
)


class Looks(pl.LightningModule):
    """Looks rows up in a table of some kind."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table, self.layer = table, nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids = batch[:, 0].long() % 50
        if isinstance(self.table, nn.Embedding):
            rows = self.table(ids)
        elif isinstance(self.table, nn.EmbeddingBag):
            rows = self.table(ids[:, None])
        else:
            rows = self.table(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))).values()
        return self.layer(rows).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _collection() -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=50, feature_names=["f"])
    return EmbeddingBagCollection([config])


TABLES: dict[str, tuple[Any, Any]] = {
    "plain DDP": (lambda: nn.Embedding(50, 4), TunedDDPStrategy),
    "replicated": (
        _collection,
        lambda: TorchRecShardedStrategy(tables={"t": {"replicated": True}}),
    ),
    "bags of DDP": (lambda: nn.EmbeddingBag(50, 4), TorchRecShardedStrategy),
    "bags": (
        lambda: nn.EmbeddingBag(50, 4),
        lambda: TorchRecShardedStrategy(convert_embeddings="all"),
    ),
    "collection": (_collection, TorchRecShardedStrategy),
}


def _warned(name: str) -> list[str]:
    rank, num_ranks = rank_and_num_ranks()
    table, strategy = TABLES[name]
    batches: Any = [batch[PARTS[rank]] for batch in torch.arange(12.0).reshape(3, 4, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(strategy=strategy(), devices=num_ranks, **DEFAULTS)
        trainer.fit(Looks(table()), DataLoader(batches, batch_size=None))
    return [str(warning.message) for warning in caught]


def test_unequal_batches_are_told_of_once_unless_losses_are_weighted() -> None:
    warned = run_each_on_ranks({name: (_warned, name) for name in TABLES}, 2)[0]
    told = {name: sum(TEXT in message for message in messages) for name, messages in warned.items()}
    assert told == {"plain DDP": 1, "replicated": 1, "bags of DDP": 1, "bags": 0, "collection": 0}
