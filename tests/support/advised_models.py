"""Modules whose needs are reckoned, and counted where they train: layers alone, a large plain
table, and bags."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

NUM_USERS, BATCH = 120_000, 16

MAKERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 1e-3, amsgrad=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-3),
    "RowWiseAdagrad": lambda parameters: RowWiseAdagrad(parameters, 0.01),
}


class Advised(pl.LightningModule):
    """Keeps its losses. optimizer: one of MAKERS."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return MAKERS[self.optimizer](self.parameters())


class Wide(Advised):
    """Three blocks of a kind, each of which fsdp_tuned gathers by itself, and a layer that is in
    none."""

    def __init__(self, optimizer: str = "AdamW", frozen: bool = False) -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))
        self.out = nn.Linear(1024, 77, bias=False)
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = (batch % 7).float().mean(1, keepdim=True).expand(-1, 1024)
        for block in self.blocks:
            hidden = block(hidden).relu()
        return self.out(hidden)


class WithTable(Advised):
    """An nn.Embedding that torchrec_sharded shards, and a layer."""

    def __init__(self, optimizer: str = "AdamW", sparse: bool = False) -> None:
        super().__init__(optimizer)
        self.users = nn.Embedding(NUM_USERS, 16, sparse=sparse)
        self.layer = nn.Sequential(
            nn.Linear(16, 256, bias=False), nn.ReLU(), nn.Linear(256, 1, bias=False)
        )

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(self.users(batch)).mean(1)


class WithLayers(WithTable):
    """A table, and layers that take memory too."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_USERS, 32)
        self.wide = nn.Sequential(
            *(nn.Linear(*size) for size in ((32, 1000), (1000, 1000), (1000, 1000), (1000, 16)))
        )

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(self.wide(self.users(batch))).mean(1)


class WithBags(Advised):
    """A collection of two tables, one of which has two features, built in configure_model."""

    def __init__(self, optimizer: str = "Adagrad") -> None:
        super().__init__(optimizer)
        self.bags: EmbeddingBagCollection | None = None
        self.layer = nn.Linear(16 + 16 + 8, 1, bias=False)

    def configure_model(self) -> None:
        if self.bags is None:
            many = EmbeddingBagConfig(
                name="many", embedding_dim=16, num_embeddings=NUM_USERS, feature_names=["a", "b"]
            )
            few = EmbeddingBagConfig(
                name="few", embedding_dim=8, num_embeddings=110_000, feature_names=["c"]
            )
            self.bags = EmbeddingBagCollection(tables=[many, few])

    def forward(self, batch: Tensor) -> Tensor:
        assert self.bags is not None
        feature_ids = batch.reshape(-1)[: 3 * 2 * len(batch)]
        lengths = torch.full((3 * len(batch),), 2, device=batch.device)
        features = KeyedJaggedTensor(keys=["a", "b", "c"], values=feature_ids, lengths=lengths)
        return self.layer(self.bags(features).values())


class Chained(Advised):
    """Blocks that pipeline_parallel splits, a layer before them and one after them."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__(optimizer)
        self.first = nn.Linear(6, 256)
        self.blocks = nn.Sequential(
            *(nn.Linear(*size) for size in ((256, 512), (512, 512), (512, 384), (384, 512)))
        )
        self.last = nn.Linear(512, 77)

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.blocks(self.first((batch % 7).float())).relu())


MODELS = (Wide, WithTable, WithLayers, WithBags, Chained)
KINDS: dict[str, type[Advised]] = {kind.__name__: kind for kind in MODELS}


def batches(rank: int, steps: int) -> list[Tensor]:
    """Return the ids of one rank's batches, (BATCH, 6) each."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 110_000, (BATCH, 6), generator=draw) for _ in range(steps)]


class Ids(pl.LightningDataModule):
    """A few batches of ids."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(batches(0, 4), batch_size=None)
