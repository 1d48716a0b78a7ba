"""Checkpoints by difference against full ones: bytes written, and what noting the rows costs a
step.

python -m tests.benchmarks.incremental [--rows 10000000] [--dim 16] [--steps 200] [--saves 4]
[--turns 20]

One rank; a table with Adagrad, of which Zipf(1.05) ids are looked up, 512 x 10 in a step. Steps
with and without noting take turns in one process, in blocks of 50.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.sharding.lookup.touched_rows import TouchedRows

BATCH, IDS = 512, 10
BLOCK = 50


class Clicks(pl.LightningModule):
    """One table, and a small network behind it."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="rows", embedding_dim=dim, num_embeddings=rows, feature_names=["items"]
        )
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        lengths = torch.full((BATCH,), IDS)
        pooled = self.ebc(KeyedJaggedTensor(keys=["items"], values=batch, lengths=lengths)).values()
        return nn.functional.binary_cross_entropy_with_logits(
            self.mlp(pooled).squeeze(1), torch.ones(BATCH)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def zipf_batches(rows: int, count: int, seed: int = 0) -> list[Tensor]:
    """Return the ids of `count` steps: rank r of the rows with a probability in proportion to r **
    -1.05."""
    weights = numpy.arange(1, rows + 1, dtype=numpy.float64) ** -1.05
    ends = numpy.cumsum(weights / weights.sum())
    draw = numpy.random.default_rng(seed)
    return [
        torch.from_numpy(numpy.searchsorted(ends, draw.random(BATCH * IDS)).clip(max=rows - 1))
        for _ in range(count)
    ]


class Turns(pl.Callback):
    """Notes rows in every other block of steps, and takes their times."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of a step, as a mean over each block."""
        self.noting: TouchedRows | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % BLOCK == 0:
            if self.noting is not None:
                self.noting.release()
                self.noting = None
            else:
                self.noting = TouchedRows(trainer.strategy.run_tables.shards.kernels)
        if batch_idx % BLOCK == 3:
            self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % BLOCK == BLOCK - 1:
            self.seconds[self.noting is not None].append(
                (time.perf_counter() - self.began) / (BLOCK - 3)
            )


class Sizes(pl.Callback):
    """Lists the sizes of checkpoints as they are written."""

    def __init__(self, folder: str) -> None:
        self.folder, self.sizes = folder, {}

    def on_train_batch_start(self, *_: Any) -> None:
        for path in Path(self.folder).glob("*.ckpt"):
            self.sizes.setdefault(path.name, sum(file.stat().st_size for file in path.iterdir()))

    on_train_end = on_train_batch_start


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only-noting", action="store_true")
    numbers = {"rows": 10_000_000, "dim": 16, "steps": 200, "saves": 4, "turns": 20}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("LIGHTNING_DISTREC_RUN_NAME", "")
    batches = zipf_batches(
        arguments.rows, max(arguments.steps * (arguments.saves + 1), 2 * BLOCK * arguments.turns)
    )
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    turns = Turns()
    trainer = pl.Trainer(strategy=TorchRecShardedStrategy(), callbacks=[turns], **options)
    trainer.fit(
        Clicks(arguments.rows, arguments.dim),
        DataLoader(batches[: 2 * BLOCK * arguments.turns], batch_size=None),
    )
    without, with_noting = (
        statistics.median(turns.seconds[index]) * 1e3 for index in (False, True)
    )
    print(
        f"step without noting {without:.3f} ms, with {with_noting:.3f} ms: "
        f"{100 * (with_noting / without - 1):+.2f}%"
    )
    if arguments.only_noting:
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = Sizes(folder)
        series = {"every": arguments.steps, "full_every": 1000 * arguments.steps, "dirpath": folder}
        strategy = TorchRecShardedStrategy(checkpoint={"incremental": series})
        trainer = pl.Trainer(strategy=strategy, callbacks=[sizes], **options)
        data = DataLoader(batches[: arguments.steps * (arguments.saves + 1)], batch_size=None)
        trainer.fit(Clicks(arguments.rows, arguments.dim), data)
    full = sizes.sizes.pop(f"step={arguments.steps}-full.ckpt")
    print(f"full checkpoint {full:,} bytes")
    for name, size in sizes.sizes.items():
        print(f"{name} {size:,} bytes: 1/{full / size:.1f}")


if __name__ == "__main__":
    main()
