"""Buffers nobody writes to are not broadcast at every step; those that are written to are, as under
DDP."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

STEPS = 24


class WithBuffer(ClickModel):
    """Its buffer is written to, by rank 1 alone, in the step `write_at`; None: never."""

    def __init__(
        self, optimizer: Any, options: dict[str, Any], write_at: int | None = None
    ) -> None:
        super().__init__(optimizer, options)
        self.register_buffer("offset", torch.zeros(2))
        self.write_at = write_at

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.write_at and self.global_rank == 1:
            self.offset.add_(1)
        return super().training_step(batch, batch_idx)


class WithBatchNorm(ClickModel):
    """Its running means are written to in every step."""

    def __init__(self, optimizer: Any, options: dict[str, Any]) -> None:
        super().__init__(optimizer, options)
        self.mlp = nn.Sequential(nn.BatchNorm1d(56), *self.mlp)


class Look(pl.Callback):
    """Notes at every step whether DDP broadcasts buffers."""

    def __init__(self) -> None:
        self.broadcast: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.broadcast.append(trainer.strategy.model.broadcast_buffers)


def _fit(kind: type, depth: int, *args: Any) -> tuple[list[bool], dict[str, Tensor]]:
    look, model = Look(), seeded(kind, torch.optim.SGD, {"lr": 0.1}, *args)
    make_trainer({"prefetch": {"depth": depth}}, callbacks=[look]).fit(
        model, rank_loader(STEPS, rank_and_num_ranks()[0])
    )
    return look.broadcast, {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_only_buffers_that_change_are_broadcast() -> None:
    calls: dict[str, tuple[Any, ...]] = {}
    for depth in (1, 3):
        calls |= {
            f"constant {depth}": (_fit, WithBuffer, depth),
            f"written {depth}": (_fit, WithBuffer, depth, 16),
            f"batch norm {depth}": (_fit, WithBatchNorm, depth),
        }
    first, other = run_each_on_ranks(calls, 2)
    for depth in (1, 3):
        assert first[f"constant {depth}"][0][0], "until it is known that they do not change"
        assert not any(first[f"constant {depth}"][0][12:])
        assert not any(first[f"written {depth}"][0][12:16])
        assert all(first[f"written {depth}"][0][20:]), "a rank wrote"
        assert all(first[f"batch norm {depth}"][0])
    for name in calls:
        assert first[name][0] == other[name][0], "both ranks broadcast, or none does"
        if "written" in name:  # rank 0's, as under DDP
            assert other[name][1]["offset"].tolist() == [0, 0]
