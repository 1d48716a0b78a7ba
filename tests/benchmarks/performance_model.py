"""The model and the batches whose steps are timed: an ordinary DLRM, and the same net without
Lightning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.streamable import Pipelineable

NUM_TABLES, DIM, NUM_DENSE = 8, 64, 13
HIDDEN = 128
BATCH_SIZE = 512
LARGEST_BAG = 20
"""Bags hold 0 to this many ids, each number as often."""
LEARNING_RATE = 0.05


def table_bytes(num_rows: int) -> int:
    """Return the bytes of all tables together."""
    return NUM_TABLES * num_rows * DIM * 4


def feature_names(num_tables: int = NUM_TABLES) -> list[str]:
    """Return the name of each table's feature; the table's own is `t_` and that."""
    return [f"f{i}" for i in range(num_tables)]


def make_net(num_rows: int, num_tables: int = NUM_TABLES, dim: int = DIM) -> DLRM:
    """Return torchrec's own DLRM with the weights from which every contender starts."""
    torch.manual_seed(7)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=dim, num_embeddings=num_rows, feature_names=[name]
        )
        for name in feature_names(num_tables)
    ]
    return DLRM(EmbeddingBagCollection(tables=tables), NUM_DENSE, [HIDDEN, dim], [HIDDEN, 1])


class LitDLRM(pl.LightningModule):
    """The net as one would train it on one device. logged: log the loss and update a metric at
    every step."""

    def __init__(
        self, num_rows: int, logged: bool = False, num_tables: int = NUM_TABLES, dim: int = DIM
    ) -> None:
        super().__init__()
        self.net = make_net(num_rows, num_tables, dim)
        self.auroc = torchmetrics.classification.BinaryAUROC() if logged else None
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        logits = self.net(batch["dense"], batch["ids"]).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        if self.auroc is not None:
            self.auroc.update(logits.detach(), batch["label"].int())
            self.log("loss", loss, batch_size=len(logits))
            self.log("auroc", self.auroc, on_step=False, on_epoch=True, batch_size=len(logits))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


@dataclass
class Batch(Pipelineable):
    """A batch as torchrec's loops get it, as its own: torchrec.datasets needs iopath where only
    this is wanted."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return it on a device."""
        return self._each(lambda part: part.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return it in pinned memory."""
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until a stream has read it."""
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)

    def _each(self, call: Callable[[Any], Any]) -> "Batch":
        return Batch(call(self.dense_features), call(self.sparse_features), call(self.labels))


class NetWithLoss(nn.Module):
    """The net as torchrec's loops call it: a batch goes in, the loss comes out."""

    def __init__(self, net: DLRM) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.net(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


Form = Callable[[Tensor, KeyedJaggedTensor, Tensor], Any]


def as_dict(dense: Tensor, ids: KeyedJaggedTensor, label: Tensor) -> dict[str, Any]:
    """Return a batch as a LightningModule gets it."""
    return {"dense": dense, "ids": ids, "label": label}


class DrawnBatches(Dataset):
    """Batches that were drawn before. A KeyedJaggedTensor keeps what it computes of itself, so each
    one is new."""

    def __init__(self, names: list[str], drawn: list[tuple[Tensor, ...]], form: Form) -> None:
        self.names, self.drawn, self.form = names, drawn, form

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, i: int) -> Any:
        dense, values, lengths, label = self.drawn[i]
        return self.form(
            dense, KeyedJaggedTensor(keys=self.names, values=values, lengths=lengths), label
        )


class Batches:
    """Some batches of one rank, in memory."""

    def __init__(
        self,
        num_rows: int,
        number: int,
        rank: int,
        num_tables: int = NUM_TABLES,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self.names = feature_names(num_tables)
        draw = torch.Generator().manual_seed(1 + rank)
        self.drawn = []
        for _ in range(number):
            lengths = torch.randint(0, LARGEST_BAG + 1, (num_tables * batch_size,), generator=draw)
            values = torch.randint(0, num_rows, (int(lengths.sum()),), generator=draw)
            dense = torch.randn(batch_size, NUM_DENSE, generator=draw)
            label = torch.randint(0, 2, (batch_size,), generator=draw).float()
            self.drawn.append((dense, values, lengths, label))

    def loader(self, form: Form, number: int, pin_memory: bool = False) -> DataLoader:
        """Return a loader of the first `number` batches, which begin again where there are
        fewer."""
        drawn = [self.drawn[i % len(self.drawn)] for i in range(number)]
        return DataLoader(
            DrawnBatches(self.names, drawn, form), batch_size=None, pin_memory=pin_memory
        )
