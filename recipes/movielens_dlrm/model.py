"""An ordinary LightningModule in the shape of DLRM: embeddings, their dot products, two small
networks.

Nothing here knows of ranks or shards. With Trainer(strategy="torchrec_sharded") the tables are
sharded;
with any other strategy, or none, the same file trains on one device.
Source of the shape: Naumov et al., Deep Learning Recommendation Model, arXiv:1906.00091.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from lightning_distrec.errors import ConfigError
from recipes.movielens_dlrm.features import DENSE, TABLES, VECTORS


class ClickModel(pl.LightningModule):
    """Predicts the chance that a user likes an item."""

    pairs: Tensor
    """(2, num_pairs): the pairs of vectors whose dot product is taken, each pair once."""

    def __init__(
        self,
        dim: int = 16,
        hidden: int = 64,
        table_learning_rate: float = 0.004,
        learning_rate: float = 0.004,
    ) -> None:
        """Set the size of the model and its learning rates.

        Args:
            dim: numbers per embedding, a multiple of 4; the same for all tables, so that dot
                products exist.
            hidden: width of the hidden layers.
            table_learning_rate: Adagrad's learning rate for the embedding tables.
            learning_rate: Adagrad's learning rate for everything else.
        """
        super().__init__()
        if dim < 4 or dim % 4:
            raise ConfigError(f"dim={dim}: TorchRec's kernels want a multiple of 4.")
        self.save_hyperparameters()
        self.dim = dim
        self.table_learning_rate = table_learning_rate
        self.learning_rate = learning_rate
        # Created in configure_model, where the strategy chooses the device.
        self.tables: EmbeddingBagCollection = None
        num_vectors = len(VECTORS) + 1
        pairs = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.bottom = nn.Sequential(
            nn.Linear(len(DENSE), hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(dim + pairs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        self.val_auroc = BinaryAUROC()
        self.test_auroc = BinaryAUROC()

    def configure_model(self) -> None:
        """Build the tables; Lightning calls this again before each fit, validate and test."""
        if self.tables is None:
            self.tables = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name,
                        num_embeddings=table.rows,
                        embedding_dim=self.dim,
                        feature_names=list(table.features),
                        pooling=PoolingType.MEAN,
                    )
                    for name, table in TABLES.items()
                ]
            )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the log-odds of a like, (batch_size,)."""
        pooled = self.tables(batch["ids"])
        from_dense = self.bottom(batch["dense"])
        vectors = torch.stack([from_dense, *(pooled[name] for name in VECTORS)], dim=1)
        dots = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([from_dense, dots], dim=1)).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(batch["label"])
        self.log(
            "train_loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            batch_size=size,
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the validation's AUROC and log-loss."""
        self._evaluate("val", self.val_auroc, batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the test's AUROC and log-loss."""
        self._evaluate("test", self.test_auroc, batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the chance of a like, (batch_size,)."""
        return torch.sigmoid(self(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad: without weight decay, a table's update needs only the rows that were
        looked up."""
        tables = list(self.tables.parameters())
        dense_parameters = [*self.bottom.parameters(), *self.top.parameters()]
        return torch.optim.Adagrad([
            {"params": tables, "lr": self.table_learning_rate},
            {"params": dense_parameters, "lr": self.learning_rate},
        ])

    def _evaluate(self, split: str, auroc: BinaryAUROC, batch: dict[str, Any]) -> None:
        logits, label = self(batch), batch["label"]
        auroc.update(torch.sigmoid(logits), label.long())
        log_loss = functional.binary_cross_entropy_with_logits(logits, label)
        self.log(
            f"{split}_log_loss", log_loss, prog_bar=True, batch_size=len(label), sync_dist=True
        )
        self.log(f"{split}_auroc", auroc, prog_bar=True, batch_size=len(label))
