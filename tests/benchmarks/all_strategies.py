"""One model that every strategy trains: a table, a chain of blocks and a head.

docs/how_to/choose_strategy.md has the picture, and the command; single devices but that of `auto`
are left out there.
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, IDS, DIM = 200_000, 20, 64


class Ids(pl.LightningDataModule):
    """Random ids and labels."""

    def __init__(self, batch_size: int = 256) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        """Twenty ids for each example."""
        draw = torch.Generator().manual_seed(1)
        number = 100 * self.batch_size
        ids = torch.randint(ROWS, (number, IDS), generator=draw)
        return DataLoader(
            TensorDataset(ids, torch.rand(number, generator=draw)), self.batch_size, shuffle=True
        )


class Model(pl.LightningModule):
    """Sums looked up rows, and computes with them in six blocks."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM))
                for _ in range(6)
            )
        )
        self.head = nn.Linear(DIM, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        ids, labels = batch
        scores = self.head(self.blocks(self.table(ids).sum(1))).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adagrad, which leaves rows without gradients as they are."""
        return torch.optim.Adagrad(self.parameters(), lr=0.01)
