"""Optimizers, cuts and the plain torch loop that sharded runs of a click model are compared
with."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.click_model import (
    ClickModel,
    join_batches,
    make_batch,
)

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
USUAL = ("SGD", "Adagrad", "Adam")
EVERY_CUT: dict[str, Any] = {
    "tables": {
        "wide": {"sharding_types": ["row_wise"]},
        "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
        "shared": {"sharding_types": ["data_parallel"]},
    }
}
STEPS = 7
State = dict[str, Tensor]
Batch = dict[str, Tensor]


def limit_of(name: str) -> float:
    """The largest difference that an optimizer is allowed: float addition in another order, and no
    more."""
    return 1e-6 if name.startswith("SGD") else 1e-5


def global_batches(steps: int = STEPS, first: int = 0, num_ranks: int = 2) -> list[Batch]:
    """Return the joined batches of the ranks."""
    return [
        join_batches([make_batch(1000 * step + rank) for rank in range(num_ranks)])
        for step in range(first, first + steps)
    ]


def loss_of(model: ClickModel, batch: Batch) -> Tensor:
    """Return the loss without logging it."""
    return nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])


def train_plain(
    model: ClickModel,
    batches: Iterable[Any],
    clip: Callable[[Iterable[nn.Parameter]], Any] = lambda _: None,
    before_batch: Callable[[int], None] = lambda _: None,
) -> State:
    """Train `model` by a plain torch loop, one step for each batch; returns its state."""
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(batches):
        before_batch(index)
        optimizer.zero_grad()
        model.training_step(batch, index).backward()
        clip(model.parameters())
        optimizer.step()
    return model.state_dict()
