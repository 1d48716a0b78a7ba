"""A training script that is killed at any moment: each rank writes its losses to a file, line by
line, as it trains.

torchrun --nproc-per-node=2 --max-restarts=3 -m tests.support.killed_script FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy
from tests.support.launched_script import DIM, NUM_ROWS, NUM_SAMPLES, Numbered, attempt

EPOCHS, BATCH = 6, 1
NUM_STEPS = EPOCHS * NUM_SAMPLES // (2 * BATCH)


class Clicks(pl.LightningModule):
    """Two tables with different updates, and a layer with dropout, whose random numbers have to go
    on as well."""

    def __init__(self, folder: Path, pause: float) -> None:
        super().__init__()
        self.folder, self.pause = folder, pause
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name]
            )
            for name in ("fused", "dense")
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        self.layer = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * DIM, 1))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        lengths = torch.full((2 * len(ids),), ids.shape[1])
        bags = self.tables(
            KeyedJaggedTensor(["fused", "dense"], torch.cat([ids, ids]).flatten(), lengths=lengths)
        )
        return (self.layer(bags.values()).squeeze(-1) - batch["label"]).pow(2).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        value = float(loss.detach())
        with open(self.folder / f"losses.{self.global_rank}", "a") as file:
            line = {
                "attempt": attempt(),
                "step": self.global_step,
                "loss": value,
                "of": batch["number"].tolist(),
            }
            file.write(json.dumps(line) + "\n")
        time.sleep(self.pause)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and write what came of it. options: the strategy's and others; pause: seconds that a
    step takes longer."""
    (
        folder / f"pid.{attempt()}.{os.environ.get('RANK', os.environ.get('SLURM_PROCID'))}"
    ).write_text(str(os.getpid()))
    pl.seed_everything(1)
    model = Clicks(folder, options.get("pause", 0.0))
    strategy = TorchRecShardedStrategy(
        tables={"tables.dense": {"embedding_update": "dense"}},
        checkpoint=options.get("checkpoint"),
        stopping=options.get("stopping"),
    )
    best = ModelCheckpoint(monitor="val_loss", filename="{epoch}", save_top_k=2)
    last = ModelCheckpoint(
        every_n_train_steps=5, filename="{step}", save_last=True, dirpath=options.get("dirpath")
    )
    early = EarlyStopping("val_loss", patience=3)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.get("devices", "auto"),
        max_epochs=EPOCHS,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[best, last, early],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loaders = [
        DataLoader(Numbered(), batch_size=BATCH, shuffle=shuffle) for shuffle in (True, False)
    ]
    trainer.fit(model, *loaders, ckpt_path=options.get("ckpt_path"))
    if options.get("dies_after_fit") and attempt() == 0 and trainer.global_rank == 1:
        os._exit(9)
    if trainer.is_global_zero:
        result = {
            "best": Path(best.best_model_path).name,
            "kept": {Path(path).name: float(score) for path, score in best.best_k_models.items()},
            "waited": early.wait_count,
            "best_score": float(early.best_score),
            "step": trainer.global_step,
            "folders": len(list(folder.rglob("checkpoints"))),
        }
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(os.environ.get("KILLED_OPTIONS", "{}")))
