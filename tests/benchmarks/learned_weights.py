"""What the exchange of weights that learn costs in a step.

`python -m tests.benchmarks.learned_weights` Two gloo ranks of this machine take turns, in the same
processes, with the exchange, and with ones in place of what it
brings: 8 tables of 100,000 x 64 with a PositionWeightedModuleCollection, 512 examples of 10 ids
each.
"""

import statistics
import time
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_distrec.sharding.lookup import weights_exchange
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

NAMES, ROWS, DIM, EXAMPLES, LENGTH = [f"f{i}" for i in range(8)], 100_000, 64, 512, 10
WARM, STEPS, ROUNDS = 8, 32, 4


class Weighted(pl.LightningModule):
    """Tables with a feature processor, and a layer or two over them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in NAMES
        ]
        tables = EmbeddingBagCollection(tables=configs, is_weighted=True)
        processors = PositionWeightedModuleCollection(dict.fromkeys(NAMES, LENGTH))
        self.tables = FeatureProcessedEmbeddingBagCollection(tables, processors)
        width = len(NAMES) * DIM
        self.over = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.times: list[float] = []

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        return self.over(self.tables(batch).values()).pow(2).mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


def measure(sharding_type: str, hidden: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each round, with and without the exchange."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(rank_and_num_ranks()[0])
    lengths, count = torch.full((len(NAMES) * EXAMPLES,), LENGTH), len(NAMES) * EXAMPLES * LENGTH
    ids = [(torch.rand(count, generator=draw) ** 3 * ROWS).long() for _ in range(WARM + STEPS)]
    loader = DataLoader(
        [KeyedJaggedTensor(NAMES, item, lengths=lengths) for item in ids], batch_size=None
    )  # type: ignore[arg-type]
    ways = {
        "with": weights_exchange._exchange,
        "without": lambda numbers, _, sizes, __: numbers.new_ones(sum(sizes)),
    }
    actual: dict[str, list[float]] = {way: [] for way in ways}
    for way, exchange in list(ways.items()) * ROUNDS:
        model = Weighted(hidden)
        with patch.object(weights_exchange, "_exchange", exchange):
            make_trainer({"sharding_types": [sharding_type]}).fit(model, loader)
        times = model.times[WARM:]
        actual[way].append(
            1000
            * statistics.median(
                final - position for position, final in zip(times, times[1:], strict=False)
            )
        )
    return actual


def main() -> None:
    """Print the medians over rounds."""
    for sharding_type in ("table_wise", "row_wise"):
        for hidden in (1, 512):
            actual = run_on_ranks(measure, 2, sharding_type, hidden)[0]
            with_it, without = (statistics.median(actual[way]) for way in ("with", "without"))
            share = 1 - without / with_it
            print(
                f"{sharding_type}, {hidden} hidden: {with_it:.1f} ms, {without:.1f} without: "
                f"{share:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
