"""A click model with a table of each way of sharding, that publishes while it trains."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import PublishRows
from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.serving.artifact import Served, export_for_serving
from tests.support.trainers import make_trainer

DIM = 8
NUM_ROWS = {"by_row": 120, "by_column": 90, "small": 12, "mapped": 48}
TABLES = {
    "by_row": {"sharding_types": ["row_wise"]},
    "by_column": {"sharding_types": ["column_wise"], "min_partition": 4},
    "small": {"sharding_types": ["data_parallel"]},
    "mapped": {"ids": "dynamic", "rows": 48, "buckets": 6},
}
"""Options of the strategy by table."""


class PublishingModel(pl.LightningModule):
    """Bags of four tables and a layer over them. optimizer: a name of torch.optim."""

    def __init__(self, optimizer: str = "Adagrad") -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=num_rows, feature_names=[name]
            )
            for name, num_rows in NUM_ROWS.items()
        ]
        self.bags = EmbeddingBagCollection(tables=configs)
        self.over = nn.Sequential(nn.Linear(DIM * len(configs), 6), nn.BatchNorm1d(6))
        self.last = nn.Linear(6, 1)
        self.optimizer = optimizer

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        keys = list(NUM_ROWS)
        features = KeyedJaggedTensor(keys, batch["ids"], lengths=batch["lengths"])
        return self.last(self.over(self.bags(features).values())).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])

    def predict_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self(batch).sigmoid()

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def click_batch(seed: int, size: int = 6) -> dict[str, Tensor]:
    """Return a batch whose ids of "mapped" have no fixed range, and change over the batches."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (len(NUM_ROWS) * size,), generator=generator)
    ids = []
    for name, feature_lengths in zip(NUM_ROWS, lengths.split(size), strict=True):
        limit = NUM_ROWS[name]
        first = 0
        if name == "mapped":
            first = 10**12 * (seed // 8)
            limit = 40
        num_ids = int(feature_lengths.sum())
        ids.append(first + torch.randint(0, limit, (num_ids,), generator=generator))
    label = torch.randint(0, 2, (size,), generator=generator).float()
    return {"ids": torch.cat(ids), "lengths": lengths, "label": label}


def train_and_publish(
    folder: str,
    num_steps: int,
    optimizer: str = "Adagrad",
    ckpt_path: str | None = None,
    **options: Any,
) -> None:
    """Train on the ranks that call it, with a checkpoint `step=N.ckpt` beside the publications
    after every third step. options: of PublishRows."""
    options = {"every_n_steps": 3, **options}
    torch.manual_seed(7)
    checkpoints = ModelCheckpoint(
        dirpath=f"{folder}/checkpoints",
        filename="{step}",
        every_n_train_steps=3,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    publish = PublishRows(f"{folder}/published", **options)
    trainer = make_trainer(
        {"tables": TABLES},
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=[publish, checkpoints],
        enable_checkpointing=True,
    )
    batches = [click_batch(step) for step in range(num_steps)]
    loader = DataLoader(batches, batch_size=None, shuffle=False)
    trainer.fit(PublishingModel(optimizer), loader, ckpt_path=ckpt_path)


def exported(checkpoint: Path, folder: Path, **options: Any) -> Served:
    """Export a checkpoint of `train_and_publish`. options: of export_for_serving."""
    contents = read_contents(checkpoint).checkpoint
    published = {"step": contents["global_step"]}
    for name in ("job", "run", "sequence"):
        published[name] = contents["published_rows"][name]
    return export_for_serving(
        PublishingModel(),
        click_batch(1000),
        folder,
        state=contents["state_dict"],
        published=published,
        **options,
    )
