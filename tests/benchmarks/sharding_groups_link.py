"""Steps of two ranks on two machines over a slow link, each machine a group with all tables, or one
group of both.

    python -m tests.benchmarks.sharding_groups_link [MBIT_PER_SECOND]

Needs root, `ip` and `tc`.
"""

import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import Communication
from tests.benchmarks.limited_link import job_of, run_on_link, save_result
from tests.support.trainers import make_trainer

NUM_TABLES, ROWS, DIM, BATCH, IDS = 8, 100_000, 64, 512, 10
EXPONENT = 1.05
VARIANTS: tuple[tuple[int | None, int], ...] = ((None, 60), (1, 60), (10, 100), (100, 300))
"""Interval, None for one group; steps that are timed."""
WARM = 10


class Clicks(pl.LightningModule):
    """Pooled tables and one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        names = [f"f{i}" for i in range(NUM_TABLES)]
        tables = [
            EmbeddingBagConfig(
                name=f"t_{n}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n]
            )
            for n in names
        ]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.top = nn.Linear(NUM_TABLES * DIM, 1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        return self.top(self.ebc(batch).values()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """Times the steps after the first ones."""

    seconds = 0.0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == WARM:
            self.begin = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.perf_counter() - self.begin


def draw(seed: int) -> KeyedJaggedTensor:
    """Return a batch with ids by Zipf."""
    shares = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-EXPONENT)
    draws = torch.Generator().manual_seed(seed)
    ids = torch.multinomial(shares, NUM_TABLES * BATCH * IDS, replacement=True, generator=draws)
    lengths = torch.full((NUM_TABLES * BATCH,), IDS)
    return KeyedJaggedTensor([f"f{i}" for i in range(NUM_TABLES)], ids, lengths=lengths)


def run_variant(interval: int | None, steps: int, rank: int) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of a step, and the bytes that this rank sends in one, by kind."""
    groups = None if interval is None else {"size": 1, "sync_interval": interval}
    clock, sent = Clock(), Communication()
    options = {"sharding_types": ["table_wise"], "sharding_groups": groups}
    trainer = make_trainer(options, callbacks=[clock, sent], num_nodes=2)
    batches = [draw(1000 * rank + step) for step in range(20)]
    loader = DataLoader([batches[i % 20] for i in range(WARM + steps)], batch_size=None)
    trainer.fit(Clicks(), loader)
    return 1000 * clock.seconds / steps, sent.bytes_per_step


def main() -> None:
    """Run the job of a folder on this rank, or start both."""
    if len(sys.argv) == 3:
        folder, rank = sys.argv[1], int(sys.argv[2])
        torch.set_num_threads(1)
        actual = [run_variant(interval, steps, rank) for interval, steps in job_of(folder)]
        if rank == 0:
            save_result(actual, folder)
        return
    mbit = int(sys.argv[1]) if len(sys.argv) > 1 else 500

    def variables(rank: int, _: str) -> dict[str, str]:
        rank_result = {
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        return rank_result | {"WORLD_SIZE": "2", "TEST_NUM_RANKS": "1", "OMP_NUM_THREADS": "1"}

    for variant in VARIANTS:
        [(milliseconds, sent)] = run_on_link(
            "tests.benchmarks.sharding_groups_link", [variant], mbit, 170, variables
        )
        tables_values = {
            kind: f"{sent[kind] / 1e6:.2f}"
            for kind in ("ids", "rows", "row gradients", "replicas of tables")
        }
        print(
            f"{variant[0] or 'one group'}: {milliseconds:.1f} ms, MB in a step {tables_values}",
            flush=True,
        )


if __name__ == "__main__":
    main()
