"""Trains a tiny model for thousands of steps with many checkpoints, and fails where a process has
grown.

    python -m tests.benchmarks.soak [--steps 4000] [--every 20] [--only background]

Each way to save has a process of its own. What it holds after each save, without files that are
mapped, is compared: the median of the last tenth with that of the second tenth, when all that is
made once has been made.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer

LIMIT = 0.05
"""By how much of its size a process may grow."""
ROWS, DIM, BATCH = 100_000, 16, 32
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"distributed": False},
    "folder": {"distributed": True},
    "background": {"distributed": False, "async_save": True},
    "incremental": {},
}
"""Ways to save -> options of checkpoints."""


class Tables(pl.LightningModule):
    """Two tables of 6 MB, and layers, with Adagrad's state of all."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in ("user", "item")
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        lengths = torch.ones(2 * BATCH, dtype=torch.long)
        pooled = self.tables(KeyedJaggedTensor(["user", "item"], ids.flatten(), lengths=lengths))
        scores: Tensor = self.top(pooled.values())
        return scores.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Saves(pl.Callback):
    """Saves every few steps, under two names in turns, and notes the bytes that the process holds
    then."""

    def __init__(self, folder: Path, every: int, saves: bool) -> None:
        self.folder, self.every, self.saves = folder, every, saves
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            if self.saves:
                trainer.save_checkpoint(
                    self.folder / f"{trainer.global_step // self.every % 2}.ckpt"
                )
            self.held.append(held_bytes())


def held_bytes() -> int:
    """Return the bytes of memory that this process has for itself."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def soak(way: str, folder: str, steps: int, every: int) -> list[int]:
    """Train on this rank, and return what it held after each save."""
    options = dict(CHECKPOINTS[way])
    if way == "incremental":
        options["incremental"] = {
            "every": every,
            "full_every": 10 * every,
            "dirpath": f"{folder}/series",
        }
    saves = Saves(Path(folder), every, saves=way != "incremental")
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, ROWS, (2, BATCH), generator=numbers) for _ in range(100)]
    loader: DataLoader[Any] = DataLoader([batches[i % 100] for i in range(steps)], batch_size=None)  # type: ignore[arg-type]
    trainer = make_trainer({"checkpoint": options}, callbacks=[saves], default_root_dir=folder)
    trainer.fit(Tables(), loader)
    return saves.held


def growth(held: list[int]) -> tuple[float, float]:
    """Return the medians of the second tenth and of the last, in bytes."""
    tenth = max(1, len(held) // 10)
    return statistics.median(held[tenth : 2 * tenth]), statistics.median(held[-tenth:])


def main() -> int:
    """Print a line for each way to save; return 1 where a process has grown by more than the
    limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    options = parser.parse_args()
    has_grown = False
    for way in options.only:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            arguments = (way, folder, options.steps, options.every)
            (held,) = run_on_ranks(soak, 1, *arguments, timeout_seconds=3600.0)
        early, late = growth(held)
        grown = late / early - 1
        has_grown |= grown > LIMIT
        sizes = [f"{num_bytes / 2**20:,.0f} MiB" for num_bytes in (early, late, max(held))]
        verdict = "GROWN" if grown > LIMIT else "flat"
        print(
            f"{way:12}{len(held)} saves: {sizes[0]}, then {sizes[1]} ({grown:+.1%}), at most "
            f"{sizes[2]}: {verdict}"
        )
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())
