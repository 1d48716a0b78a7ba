"""A dataset that gives each item once, a queue or a socket: a resumed run trains on the item after
the last."""

import queue
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_distrec import TorchRecShardedStrategy
from tests.support.trainers import one_process_trainer

STRATEGIES: dict[str, Any] = {
    "ddp_tuned": lambda: "ddp_tuned",
    "torchrec_sharded": TorchRecShardedStrategy,
}


class Items(IterableDataset[Tensor]):
    """Five items of a queue in each epoch."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(5):
            yield torch.full((1, 32), float(self.items.get(timeout=20)))


class Notes(BoringModel):
    """Notes the items of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.items.append(int(batch[0, 0]))
        return super().training_step(batch, batch_idx)


def _fit(
    strategy: str, items: Any, num_workers: int, file: Path, max_steps: int, path: Path | None
) -> list[int]:
    trainer = one_process_trainer(
        STRATEGIES[strategy](), limit_val_batches=0, max_epochs=-1, max_steps=max_steps
    )
    model = Notes()
    loader: DataLoader[Any] = DataLoader(
        Items(items),
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    trainer.fit(model, loader, ckpt_path=path)
    trainer.save_checkpoint(file)
    return model.items


@pytest.mark.parametrize(
    ("strategy", "num_workers"), [*((name, 0) for name in STRATEGIES), ("ddp_tuned", 1)]
)
def test_a_resumed_run_goes_on_with_the_next_item(
    strategy: str, num_workers: int, tmp_path: Path
) -> None:
    items: Any = get_context("fork").Queue() if num_workers else queue.Queue()
    for item in range(30):
        items.put(item)
    file = tmp_path / "checkpoint.ckpt"
    assert _fit(strategy, items, num_workers, file, 10, None) == list(range(10))
    assert _fit(strategy, items, num_workers, file, 15, file) == list(range(10, 15))
