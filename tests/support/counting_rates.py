"""A module whose weights say which learning rate each step used: under SGD, with gradients of 1,
they fall by it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

STEPS_PER_EPOCH = 4
GROUP_RATES = [1.0, 0.25]


def one_cycle(optimizer: SGD) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, [2.0, 0.5], total_steps=20, cycle_momentum=False)


def in_sequence(optimizer: SGD) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, 6),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: SGD) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Callable[[SGD], Any]] = {
    "none": lambda _: None,
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.5**n]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": one_cycle,
    "SequentialLR": in_sequence,
    "ChainedScheduler": chained,
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, factor=0.5, patience=0, threshold=1e9
    ),
}
"""Every scheduler of torch 2.13."""


class CountingRates(pl.LightningModule):
    """Two param groups of one number each."""

    def __init__(self, scheduler: str = "none", interval: str = "step") -> None:
        super().__init__()
        self.weights = nn.ParameterList([
            nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in GROUP_RATES
        ])
        self.scheduler, self.interval = scheduler, interval
        self.used: list[list[float]] = []
        """The rates of the groups in each batch, 0 where none stepped."""
        self.shown: list[list[float]] = []
        """What the param groups hold after each batch."""
        self._before = [0.0 for _ in GROUP_RATES]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("flat", 0.0)
        # Times 1, so that each weight's gradient has memory of its own: those of stacked scalars
        # share theirs, and torch then adds the gradients of accumulated batches to both.
        return torch.stack([weight * 1 for weight in self.weights]).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        current = [float(weight.detach()) for weight in self.weights]
        self.used.append([
            initial - final for initial, final in zip(self._before, current, strict=True)
        ])
        self._before = current
        groups = [
            group for optimizer in self.trainer.optimizers for group in optimizer.param_groups
        ]
        self.shown.append([group["lr"] for group in groups])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._before = [float(checkpoint["before"][i]) for i in range(len(GROUP_RATES))]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["before"] = [float(weight.detach()) for weight in self.weights]

    def optimizer(self) -> SGD:
        return SGD([
            {"params": [w], "lr": rate} for w, rate in zip(self.weights, GROUP_RATES, strict=True)
        ])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        scheduler = SCHEDULERS[self.scheduler](optimizer)
        if scheduler is None:
            return optimizer
        plateau = {"monitor": "flat"} if self.scheduler == "ReduceLROnPlateau" else {}
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, **plateau}]


class TwoByHand(CountingRates):
    """Two optimizers stepped by hand, the second at every other batch, each with a scheduler of its
    own."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for number, (optimizer, scheduler) in enumerate(
            zip(self.optimizers(), self.lr_schedulers(), strict=True)  # type: ignore[arg-type]
        ):
            if number and batch_idx % 2:
                continue
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            SGD([weight], rate) for weight, rate in zip(self.weights, GROUP_RATES, strict=True)
        ]
        return optimizers, [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]


def rates_of_plain_loop(scheduler: str, interval: str, epochs: int) -> list[list[float]]:
    """Return the rates of each step of a torch loop without anything of Lightning's or ours."""
    optimizer = CountingRates().optimizer()
    schedule = SCHEDULERS[scheduler](optimizer)
    actual = []
    for step in range(epochs * STEPS_PER_EPOCH):
        actual.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        is_due = interval == "step" or (step + 1) % STEPS_PER_EPOCH == 0
        if schedule is not None and is_due:
            schedule.step(*([0.0] if scheduler == "ReduceLROnPlateau" else []))
    return actual


def batches() -> DataLoader[Any]:
    """Return the loader of an epoch."""
    return DataLoader(list(range(STEPS_PER_EPOCH)), batch_size=None)
