"""Numbers of numpy, such as `frame.item.max() + 1`, are numbers: of rows, of columns, and in
options."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import PlanningOptions, PrefetchOptions, ShardingGroupOptions, TableOptions
from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, loader, pairs, too_far, whole_state
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

NUMBERS: dict[str, type] = {"int": int, "int64": np.int64, "int32": np.int32}


class WithBags(TwoTower):
    """Has a collection too. kind: the name of the type of its numbers of rows and columns."""

    def __init__(self, kind: str) -> None:
        number = NUMBERS[kind]
        super().__init__(number(50), number(70), number(16))
        table = EmbeddingBagConfig(
            name="t", embedding_dim=number(8), num_embeddings=number(50), feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = KeyedJaggedTensor(["f"], batch[0], lengths=torch.ones_like(batch[0]))
        return (
            super().training_step(batch, batch_idx) + self.bags(features).values().square().mean()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def _options(number: type) -> dict[str, Any]:
    return {
        "convert_embeddings": "auto",
        "min_rows": number(10),
        "batch_size_per_rank": number(12),
        "memory_bytes_per_rank": number(10**9),
        "bucket_cap_mb": number(25),
        "timeout_seconds": number(600),
        "prefetch": PrefetchOptions(depth=number(2)),
        "planning": PlanningOptions(estimate_pooling=number(2)),
        "sharding_groups": ShardingGroupOptions(size=number(2)),
        "tables": {
            "item_embedding": TableOptions(min_partition=number(8)),
            "user_embedding": {"sharding_types": ["row_wise"], "pooling_factor": number(1)},
        },
    }


def _train(number: type, folder: str) -> Any:
    rank, _ = rank_and_num_ranks()
    model = seeded(WithBags, number.__name__)
    trainer = make_trainer(_options(number), default_root_dir=folder)
    trainer.fit(model, loader([pairs(step, rank) for step in range(3)]))
    strategy: Any = trainer.strategy
    trainer.save_checkpoint(f"{folder}/{number.__name__}.ckpt")
    rows = strategy.full_parameter("item_embedding", rows=(number(3), number(40)))
    return {**whole_state(model), "rows": rows}


def test_numbers_of_numpy_train_as_python_s(tmp_path: Path) -> None:
    numbers = list(NUMBERS.values())
    results = run_each_on_ranks({n.__name__: (_train, n, str(tmp_path)) for n in numbers}, 2)[0]
    for number in numbers[1:]:
        assert too_far(results[number.__name__], results["int"], 0.0) == {}
        saved, expected = (
            torch.load(tmp_path / f"{n.__name__}.ckpt", weights_only=True) for n in (number, int)
        )
        assert too_far(saved["state_dict"], expected["state_dict"], 0.0) == {}
