"""An ordinary LightningModule: experts that all tasks share, and for each task a gate that weights
them.

Source of the shape: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts, KDD 2018.
"""

from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection

from lightning_distrec.errors import ConfigError
from recipes.criteo_dlrm.columns import NUM_CATEGORIES, NUM_INTEGERS
from recipes.criteo_dlrm.generator import TASKS
from recipes.criteo_dlrm.model import AUROC_BINS, build_tables


class MixtureOfExperts(nn.Module):
    """Experts of equal shape; each task has its own weighted average of them."""

    def __init__(self, in_features: int, num_experts: int, width: int, num_tasks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(in_features, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
            )
            for _ in range(num_experts)
        )
        self.gates = nn.ModuleList(nn.Linear(in_features, num_experts) for _ in range(num_tasks))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """Return one (batch_size, width) per task. inputs: (batch_size, in_features)."""
        outputs = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        return [(gate(inputs).softmax(1)[:, None] @ outputs).squeeze(1) for gate in self.gates]


class MultiTaskModel(pl.LightningModule):
    """Predicts the chances of a click and of a purchase."""

    def __init__(
        self,
        max_rows: int = 400_000,
        dim: int = 16,
        num_experts: int = 4,
        width: int = 64,
        loss_weights: Sequence[float] = (1.0, 1.0),
        table_learning_rate: float = 0.02,
        learning_rate: float = 0.005,
    ) -> None:
        """Set the size of the model and its learning rates.

        Args:
            max_rows: no table has more rows; the same as the data's.
            dim: numbers per embedding, a multiple of 4.
            num_experts: networks that the tasks share.
            width: outputs of an expert.
            loss_weights: weight of each task's loss: click, purchase.
            table_learning_rate: Adagrad's learning rate for the embedding tables.
            learning_rate: Adagrad's learning rate for everything else.
        """
        super().__init__()
        if len(loss_weights) != len(TASKS):
            raise ConfigError(
                f"loss_weights={loss_weights}: give one number for each of {', '.join(TASKS)}."
            )
        self.save_hyperparameters()
        # Created in configure_model, where the strategy chooses the device.
        self.tables: EmbeddingBagCollection = None
        self.mixture = MixtureOfExperts(
            NUM_INTEGERS + NUM_CATEGORIES * dim, num_experts, width, len(TASKS)
        )
        self.towers = nn.ModuleList(nn.Linear(width, 1) for _ in TASKS)
        self.val_aurocs = nn.ModuleDict({
            task: BinaryAUROC(thresholds=AUROC_BINS) for task in TASKS
        })

    def configure_model(self) -> None:
        """Build the tables; Lightning calls this again before each fit, validate and test."""
        if self.tables is None:
            self.tables = build_tables(self.hparams["max_rows"], self.hparams["dim"])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the log-odds of each task, (batch_size, num_tasks)."""
        pooled = self.tables(batch["ids"]).values()
        per_task = self.mixture(torch.cat([batch["dense"], pooled], dim=1))
        return torch.cat(
            [tower(output) for tower, output in zip(self.towers, per_task, strict=True)], dim=1
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the weighted sum of the tasks' losses."""
        losses = self._losses(self(batch), batch["label"])
        logged = {f"train_loss_{task}": loss for task, loss in zip(TASKS, losses, strict=True)}
        self.log_dict(logged)  # rank 0's, every 50 steps: one epoch has a curve, too
        total = sum(
            weight * loss for weight, loss in zip(self.hparams["loss_weights"], losses, strict=True)
        )
        self.log("train_loss", total, prog_bar=True)
        return total

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to each task's AUROC and log-loss."""
        logits, size = self(batch), len(batch["label"])
        losses = self._losses(logits, batch["label"])
        for number, (task, loss) in enumerate(zip(TASKS, losses, strict=True)):
            auroc = cast(BinaryAUROC, self.val_aurocs[task])
            auroc.update(torch.sigmoid(logits[:, number]), batch["label"][:, number].long())
            self.log(f"val_auroc_{task}", auroc, batch_size=size)
            self.log(f"val_log_loss_{task}", loss, batch_size=size, sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the chance of each task, (batch_size, num_tasks)."""
        return torch.sigmoid(self(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad: without weight decay, a table's update needs only the rows that were
        looked up."""
        return torch.optim.Adagrad([
            {"params": list(self.tables.parameters()), "lr": self.hparams["table_learning_rate"]},
            {
                "params": [*self.mixture.parameters(), *self.towers.parameters()],
                "lr": self.hparams["learning_rate"],
            },
        ])

    def _losses(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        return [
            functional.binary_cross_entropy_with_logits(logits[:, number], labels[:, number])
            for number in range(len(TASKS))
        ]
