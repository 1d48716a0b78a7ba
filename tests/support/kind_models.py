"""A model of vectors, weighted sequences, values by key and times in a zone."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec.data import ColumnData, Columns

FEATURES: dict[str, Any] = {
    "tags": {"kind": "hash", "rows": 60, "max_length": 3, "weights": "counts", "group": "weighted"},
    "taste": {"kind": "vocabulary", "rows": 9, "column": "tastes", "key": "city"},
    "hour": {"kind": "time", "column": "at", "part": "hour", "zone": "Europe/Zurich"},
    "picture": {"kind": "vector", "size": 3},
    "price": {"kind": "number", "column": "prices", "key": "city"},
}


def write_rows(folder: Path, num_rows: int = 120) -> str:
    """Write rows as a file of several row groups."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(0, 6, num_rows)
    cities = ["Bern", "Rom", "Oslo"]
    texts = pa.map_(pa.string(), pa.string())
    numbers = pa.map_(pa.string(), pa.float32())
    table = pa.table({
        "tags": [[f"t{tag}" for tag in draw.integers(0, 40, size)] for size in sizes],
        "counts": pa.array([draw.random(size) for size in sizes], pa.list_(pa.float32())),
        "tastes": pa.array([[(c, f"x{draw.integers(9)}") for c in cities] for _ in sizes], texts),
        "prices": pa.array([[(c, draw.random()) for c in cities[:2]] for _ in sizes], numbers),
        "city": draw.choice(cities, num_rows),
        "at": pa.array(draw.integers(0, 2**31, num_rows), pa.timestamp("s")),
        "picture": pa.array(list(draw.random((num_rows, 3))), pa.list_(pa.float64(), 3)),
        "y": draw.integers(0, 2, num_rows),
    })
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, folder / "rows.parquet", row_group_size=25)
    return str(folder / "rows.parquet")


def kind_data(file: str, batch_size: int, **options: Any) -> ColumnData:
    """Return batches of these rows."""
    cache = str(Path(file).parent / "cache")
    return ColumnData(file, FEATURES, "y", batch_size=batch_size, cache_dir=cache, **options)


class KindModel(pl.LightningModule):
    """Weighted and plain sums of embeddings beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        configs = []
        for name, table in Columns(FEATURES).tables.items():
            configs.append(
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=table.rows,
                    embedding_dim=4,
                    feature_names=list(table.features),
                )
            )
        self.weighted = EmbeddingBagCollection(tables=configs[:1], is_weighted=True)
        self.plain = EmbeddingBagCollection(tables=configs[1:])
        self.top = nn.Linear(3 * 4 + 4, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return log-odds."""
        sums = [self.weighted(batch["weighted"]).values(), self.plain(batch["ids"]).values()]
        return self.top(torch.cat([*sums, batch["dense"]], 1)).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss."""
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return log-odds."""
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad."""
        return torch.optim.Adagrad(self.parameters(), lr=0.1)
