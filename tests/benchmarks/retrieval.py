"""Times and memory of a step with a full softmax: the gathered weight, softmax_loss and a sampled
loss, two ranks.

    python -m tests.benchmarks.retrieval [ROWS ...]
"""

import resource
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_distrec.retrieval import sampled_softmax_loss, softmax_loss
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

DIM, QUERIES, STEPS, NEGATIVES = 64, 256, 4, 4096


class Scoring(pl.LightningModule):
    """Scores looked up vectors against all rows."""

    def __init__(self, kind: str, rows: int) -> None:
        super().__init__()
        self.kind = kind
        self.items = nn.Embedding(rows, DIM)
        self.tower = nn.Linear(DIM, DIM)
        self.ends: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        queries = self.tower(self.items(batch))
        if self.kind == "gathered_weight":
            return functional.cross_entropy(queries @ self.items.weight.T, batch)
        if self.kind == "softmax_loss":
            return softmax_loss(queries, self.items, batch)
        return sampled_softmax_loss(
            queries, self.items, batch, num_negatives=NEGATIVES, step=batch_idx
        )

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(kind: str, rows: int) -> tuple[float, float]:
    """Return the milliseconds of a step, and the GiB that the process took at most during steps."""
    gathered = {"gathered_weight": True} if kind == "gathered_weight" else {}
    strategy = {
        "tables": {"items": {"sharding_types": ["row_wise"]} | gathered},
        "convert_embeddings": "all",
        "embedding_update": "sparse" if kind == "sampled_softmax_loss" else "dense",
    }
    draw = torch.Generator().manual_seed(rank_and_num_ranks()[0])
    batches = [torch.randint(rows, (QUERIES,), generator=draw) for _ in range(STEPS)]
    model = Scoring(kind, rows)
    make_trainer(strategy).fit(model, DataLoader(batches, batch_size=None))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return 1000 * (model.ends[-1] - model.ends[0]) / (STEPS - 1), peak


def main() -> None:
    """Print a row for each number of items."""
    numbers = [int(number) for number in sys.argv[1:]] or [100_000, 1_000_000]
    kinds = ["gathered_weight", "softmax_loss", "sampled_softmax_loss"]
    print(f"{QUERIES} queries on each of 2 ranks, dim {DIM}: ms a step, GiB of a process at most")
    for rows in numbers:
        for kind in kinds:
            results = run_on_ranks(measure, 2, kind, rows, timeout_seconds=500)
            milliseconds = max(result[0] for result in results)
            gigabytes = max(result[1] for result in results)
            print(f"{rows:>10,} {kind:<22} {milliseconds:8.0f} ms {gigabytes:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
