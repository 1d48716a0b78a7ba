"""Sharded runs of a click model with each of some optimizers, and the plain torch loop they are
compared with."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
ALL = tuple(OPTIMIZERS)
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


def fit_with_each(
    kind: type,
    names: Iterable[str],
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> dict[str, State]:
    """Train a model of this kind on this rank with each optimizer in turn; returns what each
    trained."""
    states = {}
    for name in names:
        model = seeded(kind, *OPTIMIZERS[name])
        trainer = make_trainer(strategy, **copy.deepcopy(options or {}))
        trainer.fit(model, rank_loader(steps, rank_and_num_ranks()[0]))
        states[name] = model.final_state
    return states


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


def train_plain_click_model(name: str) -> State:
    """Train a click model with the optimizer of this name on all batches, one step for each."""
    return train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches())


def assert_equal(
    actual: dict[str, State], expected: Callable[[str], State], start: State | None = None
) -> None:
    """Compare what was trained under each name of an optimizer with what `wanted` trains for it."""
    assert actual
    for name, state in actual.items():
        reference = expected(name)
        differences = largest_difference(state, reference)
        assert max(differences.values()) <= limit_of(name), f"{name}: {differences}"
        moved = largest_difference(
            reference, start or seeded(ClickModel, *OPTIMIZERS["SGD"]).state_dict()
        )
        assert min(moved.values()) > 1e-4, f"{name}: {moved}"
