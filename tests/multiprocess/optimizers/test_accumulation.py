"""Gradients of several batches, backward passes or lookups add up to one update of a sharded
table."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from tests.support.click_model import ClickModel, LooksUpTwice, seeded
from tests.support.plain_loop import (
    ALL,
    OPTIMIZERS,
    STEPS,
    Batch,
    State,
    assert_equal,
    fit_with_each,
    global_batches,
    loss_of,
    train_plain,
)
from tests.support.ranks import run_each_on_ranks


class ManualModel(ClickModel):
    """Gives each batch to `recipe`, which does the rest."""

    recipe: Callable[..., None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        type(self).recipe(self, self.optimizers(), self.manual_backward, batch, batch_idx)


def accumulate(
    model: ClickModel, optimizer: Any, backward: Callable[[Tensor], None], batch: Batch, index: int
) -> None:
    """Step at every third batch, after two backward passes for each."""
    for scale in (1.0, 0.3):
        backward(scale * loss_of(model, batch))
    if index % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


def discard(
    model: ClickModel, optimizer: Any, backward: Callable[[Tensor], None], batch: Batch, index: int
) -> None:
    """Forget the gradients of a first backward, and of every third batch."""
    backward(5.0 * loss_of(model, batch))
    optimizer.zero_grad()
    backward(loss_of(model, batch))
    if index % 3 == 1:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def pile_up(
    model: ClickModel, optimizer: Any, backward: Callable[[Tensor], None], batch: Batch, index: int
) -> None:
    """Never forget a gradient."""
    backward(0.1 * loss_of(model, batch))
    optimizer.step()


class Accumulates(ManualModel):
    """Accumulates by hand."""

    recipe = accumulate


class Discards(ManualModel):
    """Calls zero_grad before step."""

    recipe = discard


class PilesUp(ManualModel):
    """Calls no zero_grad."""

    recipe = pile_up


class SkipsSteps(ClickModel):
    """Steps at every second batch, by the pattern in Lightning's documentation."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


MANUAL = (Accumulates, Discards, PilesUp)
LATER = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}
RUNS: dict[str, tuple[Any, ...]] = {
    "accumulate_grad_batches": (fit_with_each, ClickModel, ALL, {}, {"accumulate_grad_batches": 3}),
    "scheduler": (fit_with_each, ClickModel, ALL, {}, LATER, 5),
    **{kind.__name__: (fit_with_each, kind, ALL) for kind in MANUAL},
    "SkipsSteps": (fit_with_each, SkipsSteps, ALL),
    "LooksUpTwice auto": (fit_with_each, LooksUpTwice, ("SGD", "Adagrad", "RowWiseAdagrad")),
    "LooksUpTwice sparse": (
        fit_with_each,
        LooksUpTwice,
        ("Adagrad",),
        {"embedding_update": "sparse"},
    ),
    "LooksUpTwice dense": (
        fit_with_each,
        LooksUpTwice,
        ("Adagrad", "RowWiseAdagrad"),
        {"embedding_update": "dense"},
    ),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What rank 0 trained in each run."""
    return run_each_on_ranks(RUNS, 2)[0]


def train_accumulating(name: str, epochs: list[tuple[int, int]]) -> State:
    """Train plainly; epochs: of each, its batches and the batches for one step. The last step takes
    what is left."""
    model = seeded(ClickModel, *OPTIMIZERS[name])
    optimizer = model.configure_optimizers()
    for batches, accumulate in epochs:
        for index, batch in enumerate(global_batches(batches)):
            (loss_of(model, batch) / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == batches:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def test_accumulated_batches_make_one_step(results: dict[str, Any]) -> None:
    assert_equal(
        results["accumulate_grad_batches"], lambda name: train_accumulating(name, [(STEPS, 3)])
    )


def test_accumulation_that_a_scheduler_begins_later_is_exact(results: dict[str, Any]) -> None:
    assert_equal(results["scheduler"], lambda name: train_accumulating(name, [(5, 1), (5, 2)]))


def test_manual_optimization_decides_when_gradients_are_used_and_forgotten(
    results: dict[str, Any],
) -> None:
    for kind in MANUAL:

        def plain(name: str, kind: type[ManualModel] = kind) -> State:
            model = seeded(ClickModel, *OPTIMIZERS[name])
            optimizer = model.configure_optimizers()
            for index, batch in enumerate(global_batches()):
                kind.recipe(model, optimizer, Tensor.backward, batch, index)
            return model.state_dict()

        assert_equal(results[kind.__name__], plain)


def test_an_optimizer_step_that_steps_at_every_second_batch_is_exact(
    results: dict[str, Any],
) -> None:
    def plain(name: str) -> State:
        model = seeded(ClickModel, *OPTIMIZERS[name])
        optimizer = model.configure_optimizers()
        for index, batch in enumerate(global_batches()):
            if index % 2 == 0:
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            if index % 2:
                optimizer.step()
        return model.state_dict()

    assert_equal(results["SkipsSteps"], plain)


def test_gradients_of_several_lookups_make_one_update(results: dict[str, Any]) -> None:
    def plain(name: str) -> State:
        return train_plain(seeded(LooksUpTwice, *OPTIMIZERS[name]), global_batches())

    for update in ("auto", "sparse", "dense"):
        assert_equal(results[f"LooksUpTwice {update}"], plain)
