"""Gradients of sharded tables are clipped as those of whole tables: by the Trainer, by hand and in
the model's hook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.click_model import ClickModel, largest_difference, rank_loader, seeded
from tests.support.plain_loop import (
    EVERY_CUT,
    OPTIMIZERS,
    USUAL,
    Batch,
    State,
    assert_equal,
    fit_with_each,
    global_batches,
    limit_of,
    loss_of,
    train_plain,
    train_plain_click_model,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

CLIPPING: dict[str, tuple[float, Callable[..., Any]]] = {
    "norm": (0.05, clip_grad_norm_),
    "value": (0.002, clip_grad_value_),
}


class ClipsByHand(ClickModel):
    """Clips in manual optimization."""

    algorithm = "norm"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self, batch))
        self.clip_gradients(optimizer, CLIPPING[self.algorithm][0], self.algorithm)
        optimizer.step()


class ClipsByHandByValue(ClipsByHand):
    """The same by value."""

    algorithm = "value"


class ClipsInItsHook(ClickModel):
    """Clips by itself, without a word to the Trainer or with what the Trainer was told."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        limit = CLIPPING["norm"][0] if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, limit, gradient_clip_algorithm or "norm")


def _by_trainer(algorithm: str) -> dict[str, Any]:
    return {"gradient_clip_val": CLIPPING[algorithm][0], "gradient_clip_algorithm": algorithm}


def _accumulated_and_clipped() -> State:
    model = seeded(ClickModel, *ADAM)
    options = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    }
    make_trainer(**options).fit(model, rank_loader(8, rank_and_num_ranks()[0]))
    return model.final_state


ADAM = (torch.optim.Adam, {"lr": 0.1})
RUNS: dict[str, tuple[Any, ...]] = {
    "norm by the Trainer": (fit_with_each, ClickModel, USUAL, {}, _by_trainer("norm")),
    "norm by hand": (fit_with_each, ClipsByHand, USUAL, EVERY_CUT),
    "norm in the hook": (fit_with_each, ClipsInItsHook, USUAL, EVERY_CUT),
    "value by the Trainer": (fit_with_each, ClickModel, USUAL, {}, _by_trainer("value")),
    "value by hand": (fit_with_each, ClipsByHandByValue, USUAL, EVERY_CUT),
    "value in the hook": (fit_with_each, ClipsInItsHook, USUAL, EVERY_CUT, _by_trainer("value")),
    "accumulated": (_accumulated_and_clipped,),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What rank 0 trained in each run."""
    return run_each_on_ranks(RUNS, 2)[0]


@pytest.mark.parametrize("algorithm", CLIPPING)
def test_gradients_are_clipped_as_those_of_whole_tables(
    results: dict[str, Any], algorithm: str
) -> None:
    limit, clip = CLIPPING[algorithm]

    def plain(name: str) -> State:
        clipped = train_plain(
            seeded(ClickModel, *OPTIMIZERS[name]), global_batches(), lambda p: clip(p, limit)
        )
        free = train_plain_click_model(name)
        # Adagrad and Adam divide by the size of gradients: the limit must matter to them too.
        assert min(largest_difference(clipped, free).values()) > 10 * limit_of(name)
        return clipped

    for clipper in ("by the Trainer", "by hand", "in the hook"):
        assert_equal(results[f"{algorithm} {clipper}"], plain)


def test_accumulated_gradients_are_clipped_where_they_make_a_step(results: dict[str, Any]) -> None:
    model = seeded(ClickModel, *ADAM)
    optimizer = model.configure_optimizers()
    for step, batch in enumerate(global_batches(8)):
        (model.training_step(batch, step) / 2).backward()
        if step % 2:
            clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert max(largest_difference(results["accumulated"], model.state_dict()).values()) <= 1e-5
