"""A model of clicks with columns, which notes the rows that it was trained on."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import torch
import yaml
from pyarrow import parquet
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec.data import ColumnData, Columns

FEATURES: dict[str, Any] = {
    "row": {"kind": "number"},
    "user": {"kind": "hash", "rows": 50},
    "history": {"kind": "vocabulary", "rows": 20, "max_length": 3},
    "price": {"kind": "number", "log": True, "standardize": True},
}


def write_job(path: Path, model: str, file: str) -> None:
    """Write the YAML of a job of this model over a file of clicks."""
    init_args = {
        "train": file,
        "features": FEATURES,
        "label": "clicked",
        "cache_dir": str(path.parent / "cache"),
    }
    data = {"class_path": "lightning_distrec.data.ColumnData", "init_args": init_args}
    path.write_text(yaml.safe_dump({"model": {"class_path": model}, "data": data}))


def write_clicks(folder: Path, num_rows: int = 300) -> str:
    """Write clicks as a file of several row groups."""
    draw = np.random.default_rng(0)
    table = pa.table({
        "row": np.arange(num_rows, dtype=np.float64),
        "user": [f"u{number}" for number in draw.integers(0, 40, num_rows)],
        "history": [
            [f"i{item}" for item in draw.integers(0, 30, size)]
            for size in draw.integers(0, 5, num_rows)
        ],
        "price": draw.lognormal(size=num_rows),
        "clicked": draw.integers(0, 2, num_rows),
    })
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, folder / "clicks.parquet", row_group_size=35)
    return str(folder / "clicks.parquet")


def click_data(file: Any, **options: Any) -> ColumnData:
    """Return batches of these clicks."""
    defaults = {"batch_size": 8, "buffer_rows": 70, "cache_dir": str(Path(file).parent / "cache")}
    return ColumnData(file, FEATURES, "clicked", **(defaults | options))


class ColumnModel(pl.LightningModule):
    """Pooled embeddings and numbers; `trained` has the rows of each step."""

    def __init__(self, features: dict[str, Any] = FEATURES, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = Columns(features).tables
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=about.rows,
                    embedding_dim=dim,
                    feature_names=list(about.features),
                )
                for name, about in tables.items()
            ]
        )
        self.top = nn.Linear(dim * len(tables) + 1, 1)
        self.trained: list[list[int]] = []

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return log-odds."""
        return self.top(
            torch.cat([self.tables(batch["ids"]).values(), batch["dense"][:, 1:]], 1)
        ).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss, and note the rows."""
        self.trained.append(batch["dense"][:, 0].int().tolist())
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self(batch).mean(), batch_size=len(batch["label"]), sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return chances."""
        return torch.sigmoid(self(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad."""
        return torch.optim.Adagrad(self.parameters(), lr=0.05)
