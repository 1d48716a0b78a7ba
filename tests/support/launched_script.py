"""A training script as a user writes it: neither devices nor nodes are named. Each rank prints what
it was and did.

srun -n4 python -m tests.support.launched_script
"""

import json
import os
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy

NUM_SAMPLES, NUM_ROWS, DIM = 24, 40, 8
RESULT = "RESULT "


def attempt() -> int:
    """Return how often this job has been started before: by the launcher, or as an earlier step of
    Slurm's."""
    restarts = os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", os.environ.get("SLURM_RESTART_COUNT", "0")
    )
    return int(restarts) + int(os.environ.get("SLURM_STEP_ID", "0"))


class Numbered(Dataset[dict[str, Tensor]]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(0, NUM_ROWS, (3,), generator=draw)
        return {"number": torch.tensor(index), "ids": ids, "label": torch.rand((), generator=draw)}


class Clicks(pl.LightningModule):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="item", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=["item"]
        )
        self.tables = EmbeddingBagCollection(tables=[config])
        self.layer = nn.Linear(DIM, 1)
        self.seen: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        signalled = os.environ.get("LAUNCHED_SIGNALS", "").split()
        if batch_idx == 2 and attempt() == 0 and len(signalled) > self.global_rank:
            time.sleep(self.global_rank)
            os.kill(os.getpid(), getattr(signal, signalled[self.global_rank], 0))
        ids = batch["ids"]
        features = KeyedJaggedTensor(
            ["item"], ids.flatten(), lengths=torch.full((len(ids),), ids.shape[1])
        )
        loss = (
            (self.layer(self.tables(features).values()).squeeze(-1) - batch["label"]).pow(2).mean()
        )
        self.seen += batch["number"].tolist()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    """The same samples for a LightningCLI."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Numbered(), batch_size=2, shuffle=True)


def train(strategy: Any = "torchrec_sharded", **options: Any) -> dict[str, Any]:
    """Train for an epoch and return what this rank was and did."""
    pl.seed_everything(1)
    model = Clicks()
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if "stopping" in options:
        strategy = TorchRecShardedStrategy(stopping=options.pop("stopping"))
    trainer = pl.Trainer(strategy=strategy, **(settings | options))
    try:
        trainer.fit(model, DataLoader(Numbered(), batch_size=2, shuffle=True))
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return {
        "rank": trainer.global_rank,
        "num_ranks": trainer.world_size,
        "local_rank": trainer.local_rank,
        "node": trainer.node_rank,
        "num_nodes": trainer.num_nodes,
        "host": os.environ.get("SLURMD_NODENAME", ""),
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "published": {name: os.environ.get(name) for name in names},
        "attempt": attempt(),
        "code": code,
        "threads": torch.get_num_threads(),
        "seen": model.seen,
        "losses": model.losses,
    }


def main() -> None:
    """Train with the options in LAUNCHED_OPTIONS, JSON, and print what came of it as one line.

    LAUNCHED_SIGNALS: what each rank sends itself at the third step of the first attempt, SIGUSR1,
    say, or "no", a second after the rank before it.
    """
    result = train(**json.loads(os.environ.get("LAUNCHED_OPTIONS", "{}")))
    print(RESULT + json.dumps(result), flush=True)
    sys.exit(result["code"])


if __name__ == "__main__":
    main()
