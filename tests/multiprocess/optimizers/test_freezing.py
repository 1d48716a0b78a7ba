"""Sharded tables rest while they are frozen or another optimizer is toggled, and learn on
afterwards."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_distrec.errors import DistRecError
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    bag_configs,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import (
    EVERY_CUT,
    OPTIMIZERS,
    STEPS,
    USUAL,
    Batch,
    State,
    assert_equal,
    fit_with_each,
    global_batches,
    loss_of,
    train_plain,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer


class FreezesTables(ClickModel):
    """Freezes its tables for two batches in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.freeze_or_not(batch_idx)

    def freeze_or_not(self, index: int) -> None:
        if index in (2, 4):
            self.ebc.requires_grad_(index == 4)


class FreezesOneTable(FreezesTables):
    """The same with one of them."""

    def freeze_or_not(self, index: int) -> None:
        if index in (2, 4):
            self.ebc.embedding_bags["wide"].requires_grad_(index == 4)


class Tower(pl.LightningModule):
    """Tables in a LightningModule of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=bag_configs())

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.tables(features)


class FreezesTower(FreezesTables):
    """Calls freeze and unfreeze of the inner LightningModule."""

    def _build(self) -> None:
        self.ebc = Tower()

    def freeze_or_not(self, index: int) -> None:
        if index == 2:
            self.ebc.freeze()
        if index == 4:
            self.ebc.unfreeze()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch)


def _freeze_and_unfreeze() -> tuple[dict[str, State], Tensor]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in USUAL:
        model = seeded(FreezesTower, *OPTIMIZERS[name])
        model.freeze()
        predicted = make_trainer().predict(model, rank_loader(1, rank))[0]
        model.unfreeze()
        make_trainer().fit(model, rank_loader(STEPS, rank))
        states[name] = model.final_state
    return states, predicted


FREEZING: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"embedding_update": "sparse"}),
    ("SGD", {"embedding_update": "dense"}),
    ("SGD", {"sharding_types": ["table_wise"]}),
    ("SGD", {"sharding_types": ["column_wise"]}),
    ("Adagrad", {}),
    ("Adagrad", {"embedding_update": "sparse", "sharding_types": ["table_wise"]}),
    ("RowWiseAdagrad", {}),
    ("Adam", {}),
]
KINDS = (FreezesTables, FreezesOneTable)
RUNS: dict[str, tuple[Any, ...]] = {
    **{
        f"{kind.__name__} {case}": (fit_with_each, kind, (name,), strategy)
        for kind in KINDS
        for case, (name, strategy) in enumerate(FREEZING)
    },
    "every cut": (fit_with_each, FreezesTables, USUAL, EVERY_CUT),
    "freeze": (_freeze_and_unfreeze,),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What rank 0 trained in each run."""
    return run_each_on_ranks(RUNS, 2)[0]


def train_freezing(kind: type[FreezesTables], name: str) -> State:
    """Train by a plain loop, tables frozen for two batches."""
    model = seeded(kind, *OPTIMIZERS[name])
    return train_plain(model, global_batches(), before_batch=model.freeze_or_not)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_rest_while_they_are_frozen_and_learn_on_afterwards(
    results: dict[str, Any], kind: type[FreezesTables]
) -> None:
    for case in range(len(FREEZING)):
        assert_equal(results[f"{kind.__name__} {case}"], lambda name: train_freezing(kind, name))


def test_tables_that_every_rank_holds_whole_can_be_frozen_too(results: dict[str, Any]) -> None:
    assert_equal(results["every cut"], lambda name: train_freezing(FreezesTables, name))


def test_freeze_and_unfreeze_of_a_lightning_module_reach_its_tables(
    results: dict[str, Any],
) -> None:
    states, predicted = results["freeze"]
    start = seeded(FreezesTower, *OPTIMIZERS["SGD"])
    torch.testing.assert_close(predicted, start(make_batch(0)).detach(), atol=1e-6, rtol=0)
    assert_equal(states, lambda name: train_freezing(FreezesTower, name), start.state_dict())


class Toggles(ClickModel):
    """Two optimizers that take turns, as in Lightning's documentation of GANs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [self.optimizer(part.parameters(), **self.options) for part in (self.ebc, self.mlp)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for scale, optimizer in zip((1.0, 3.0), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(scale * loss_of(self, batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class TogglesOneTable(Toggles):
    """The same with one table, so that a rank may have no row of any."""

    def _build(self) -> None:
        self.ebc = EmbeddingBagCollection(tables=bag_configs()[:1])
        self.first = nn.Linear(32, 56, bias=False).requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.first(self.ebc(features).values())).squeeze(-1)


def train_toggling(kind: type[Toggles], name: str) -> State:
    """Train the tables and the rest in turn, by a plain loop."""
    model = seeded(kind, *OPTIMIZERS[name])
    optimizers = model.configure_optimizers()
    for batch in global_batches():
        for scale, optimizer in zip((1.0, 3.0), optimizers, strict=True):
            (scale * loss_of(model, batch)).backward()
            optimizer.step()
            for toggled_optimizer in optimizers:
                toggled_optimizer.zero_grad()
    return model.state_dict()


def _toggled_over_fused_tables() -> tuple[dict[str, State], str]:
    try:
        return fit_with_each(
            Toggles, ("SGD",), {"find_unused_parameters": True, "embedding_update": "fused"}
        ), ""
    except DistRecError as refused:
        return {}, str(refused)


DDP = {"find_unused_parameters": True}
"""What DDP needs for dense layers that get no gradient."""
TOGGLED: dict[str, tuple[Any, ...]] = {
    **{
        f"{kind.__name__} {cut}": (fit_with_each, kind, USUAL, DDP | {"sharding_types": [cut]})
        for kind in (Toggles, TogglesOneTable)
        for cut in ("row_wise", "table_wise")
    },
    "fused": (_toggled_over_fused_tables,),
}


@pytest.fixture(scope="module")
def toggled() -> list[dict[str, Any]]:
    """What each rank trained in each run."""
    return run_each_on_ranks(TOGGLED, 2)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
@pytest.mark.parametrize("kind", [Toggles, TogglesOneTable])
def test_optimizers_that_are_toggled_update_their_own_parameters_only(
    toggled: list[dict[str, Any]], kind: type[Toggles], cut: str
) -> None:
    start = seeded(kind, *OPTIMIZERS["SGD"]).state_dict()
    assert_equal(
        toggled[0][f"{kind.__name__} {cut}"], lambda name: train_toggling(kind, name), start
    )


def test_fused_tables_rest_while_another_optimizer_is_toggled_or_are_refused(
    toggled: list[dict[str, Any]],
) -> None:
    for rank_results in toggled:
        states, refused = rank_results["fused"]
        if refused:
            assert re.search("table 'ebc.wide' .*embedding_update='(auto|sparse)'", refused)
        elif rank_results is toggled[0]:  # the other ranks have no full tables
            assert_equal(states, lambda name: train_toggling(Toggles, name))
