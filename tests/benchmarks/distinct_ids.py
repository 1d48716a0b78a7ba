"""Times and bytes of sequences whose repeated ids are sent once, and each time.

`python -m tests.benchmarks.distinct_ids [sharding type ...]` Two gloo ranks of this machine take
turns, in the same processes: Zipf(1.05) ids over a million rows, 50 in a sequence.
"""

import statistics
import sys
import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_distrec import Communication
from lightning_distrec.sharding.planning import costs
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

ROWS, DIM, EXAMPLES, LENGTH, EXPONENT = 1_000_000, 64, 512, 50, 1.05
WARM, STEPS, ROUNDS = 6, 20, 5
WAYS = {"each time": 0.0, "once": 1.0}
"""Name -> the share of different ids up to which they are sent once."""


class Sequences(pl.LightningModule):
    """Averages the rows of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["items"]
        )
        self.rows = EmbeddingCollection(tables=[config])
        self.head = torch.nn.Linear(DIM, 1)
        self.times: list[float] = []

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        rows = self.rows(batch)["items"].values()
        return self.head(rows.view(EXAMPLES, LENGTH, DIM).mean(1)).pow(2).mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


def batches(rank: int, steps: int) -> list[KeyedJaggedTensor]:
    """Return the batches of a rank."""
    draw = np.random.default_rng(rank)
    weights = np.arange(1, ROWS + 1) ** -EXPONENT
    weights = weights / weights.sum()
    popular = np.random.default_rng(99).permutation(ROWS)
    lengths = torch.full((EXAMPLES,), LENGTH)
    drawn = (popular[draw.choice(ROWS, size=EXAMPLES * LENGTH, p=weights)] for _ in range(steps))
    return [KeyedJaggedTensor(["items"], torch.from_numpy(ids), lengths=lengths) for ids in drawn]


def measure(sharding_type: str) -> dict[str, tuple[list[float], dict[str, float], float]]:
    """Return by way the milliseconds of a step in each round, bytes by kind, and the planned
    bytes."""
    torch.set_num_threads(1)
    rank, _ = rank_and_num_ranks()
    loader = DataLoader(batches(rank, WARM + STEPS), batch_size=None)  # type: ignore[arg-type]
    actual: dict[str, tuple[list[float], dict[str, float], float]] = {}
    for turn in range(ROUNDS):
        for way in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
            costs.MAX_DISTINCT_SHARE = WAYS[way]
            torch.manual_seed(0)
            model, counts = Sequences(), Communication()
            strategy = {"sharding_types": [sharding_type], "planning": {"estimate_pooling": 2}}
            trainer = make_trainer(strategy | {"batch_size_per_rank": EXAMPLES}, callbacks=[counts])
            plans: list[Any] = []
            model.on_train_start = lambda plans=plans, trainer=trainer: plans.append(
                trainer.strategy.run_tables.plan
            )
            trainer.fit(model, loader)
            times = np.diff(model.times[WARM:]) * 1000
            way_values = actual.setdefault(
                way, ([], counts.mean_bytes_per_step, float(plans[0].traffic.sent().mean()))
            )
            way_values[0].append(float(np.median(times)))
            dist.barrier()
    return actual


def main() -> None:
    """Print both ways for each sharding type."""
    for sharding_type in sys.argv[1:] or ["row_wise", "table_wise"]:
        actual = run_on_ranks(measure, 2, sharding_type, timeout_seconds=170)[0]
        totals = {way: sum(sent.values()) for way, (_, sent, _) in actual.items()}
        for way, (times, sent, planned) in actual.items():
            kinds = ", ".join(f"{kind} {number:,.0f}" for kind, number in sent.items())
            ratio = totals["each time"] / totals[way]
            print(
                f"{sharding_type}, {way}: {statistics.median(times):.1f} ms "
                f"{[round(t, 1) for t in times]}, ",
                end="",
            )
            print(f"{totals[way]:,.0f} bytes ({ratio:.2f}x fewer), planned {planned:,.0f}; {kinds}")


if __name__ == "__main__":
    main()
