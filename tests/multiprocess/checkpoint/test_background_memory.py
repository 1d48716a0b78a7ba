"""Checkpoints that are written in the background leave no memory behind."""

import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer

ROWS, DIM, BATCH = 100_000, 16, 32
STEPS, EVERY = 240, 4


class Tables(pl.LightningModule):
    """Two tables of 6 MB, and layers, with Adagrad's state of all."""

    def __init__(self) -> None:
        super().__init__()
        configs = []
        for name in ("user", "item"):
            names: dict[str, Any] = {"name": name, "feature_names": [name]}
            configs.append(EmbeddingBagConfig(embedding_dim=DIM, num_embeddings=ROWS, **names))
        self.tables = EmbeddingBagCollection(tables=configs)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        lengths = torch.ones(2 * BATCH, dtype=torch.long)
        pooled = self.tables(KeyedJaggedTensor(["user", "item"], ids.flatten(), lengths=lengths))
        return self.top(pooled.values()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Saves(pl.Callback):
    """Saves every few steps, under two names in turns, and notes the bytes that the process holds
    then."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.held_bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        number, remainder = divmod(trainer.global_step, EVERY)
        if remainder == 0:
            trainer.save_checkpoint(f"{self.folder}/{number % 2}.ckpt")
            status = Path("/proc/self/status").read_text()
            self.held_bytes.append(1024 * int(status.partition("RssAnon:")[2].split()[0]))


def held_after_saves(folder: str) -> list[int]:
    """Train on this rank, and return what it held after each save."""
    saves, draw = Saves(folder), torch.Generator().manual_seed(0)
    batches = [torch.randint(0, ROWS, (2, BATCH), generator=draw) for _ in range(STEPS)]
    checkpoint = {"distributed": False, "async_save": True}
    options = {"callbacks": [saves], "default_root_dir": folder}
    trainer = make_trainer({"checkpoint": checkpoint}, **options)
    trainer.fit(Tables(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return saves.held_bytes


@pytest.mark.slow
def test_a_process_does_not_grow_with_checkpoints_in_the_background(tmp_path: Path) -> None:
    (held,) = run_on_ranks(held_after_saves, 1, str(tmp_path))
    assert len(held) == STEPS // EVERY
    tenth = len(held) // 10
    early = statistics.median(held[tenth : 2 * tenth])
    late = statistics.median(held[-tenth:])
    assert late < 1.05 * early, [num_bytes >> 20 for num_bytes in held]
