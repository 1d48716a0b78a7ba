"""The model whose plans are timed: tables of unlike dims, rows and bags, and hardly anything
else."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec.sharding.planning.table_options import TableOptions

SIZES = {
    "clicks": (100_000, 64, 20),
    "goods": (200_000, 32, 40),
    "users": (50_000, 128, 1),
    "words": (20_000, 16, 60),
    "shops": (5_000, 64, 5),
}
"""Table -> rows, dim, ids per example."""
NARROWEST = 32
"""Columns of a column-wise shard."""
BATCH_SIZE = 512
LEARNING_RATE = 0.05


def options() -> dict[str, TableOptions]:
    """Return what planners are told of each table."""
    return {
        name: TableOptions(pooling_factor=float(pooling), min_partition=NARROWEST)
        for name, (_, _, pooling) in SIZES.items()
    }


def make_tables(device: torch.device | None = None) -> EmbeddingBagCollection:
    """Return the tables."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
            )
            for name, (rows, dim, _) in SIZES.items()
        ],
        device=device,
    )


class LitTables(pl.LightningModule):
    """Bags of all tables side by side, and one layer on them."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc: EmbeddingBagCollection | None = None
        self.top = nn.Linear(sum(dim for _, dim, _ in SIZES.values()), 1)

    def configure_model(self) -> None:
        if self.ebc is None:
            self.ebc = make_tables()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert self.ebc is not None
        logits = self.top(self.ebc(batch["ids"]).values()).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class _Drawn(Dataset):
    """Batches that were drawn before. A KeyedJaggedTensor keeps what it computes of itself, so each
    one is new."""

    def __init__(self, drawn: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, i: int) -> dict[str, Any]:
        values, lengths, label = self.drawn[i]
        ids = KeyedJaggedTensor(
            keys=[f"f_{name}" for name in SIZES], values=values, lengths=lengths
        )
        return {"ids": ids, "label": label}


def batches(number: int, rank: int) -> DataLoader:
    """Return so many batches of one rank. Bags hold none to twice the ids that planners are told
    of."""
    draw = torch.Generator().manual_seed(1 + rank)
    drawn = []
    for _ in range(number):
        lengths = [
            torch.randint(0, 2 * n + 1, (BATCH_SIZE,), generator=draw) for _, _, n in SIZES.values()
        ]
        values = [
            torch.randint(0, rows, (int(length.sum()),), generator=draw)
            for length, (rows, _, _) in zip(lengths, SIZES.values(), strict=True)
        ]
        label = torch.randint(0, 2, (BATCH_SIZE,), generator=draw).float()
        drawn.append((torch.cat(values), torch.cat(lengths), label))
    return DataLoader(_Drawn(drawn), batch_size=None)
