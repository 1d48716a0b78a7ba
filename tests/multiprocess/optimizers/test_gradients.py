"""Gradients of several batches, backward passes or lookups, clipped or changed by hooks, give the
update of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_distrec import sharded_l2
from tests.support.cases import Case, check, check_refused, click_case, for_each
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    LooksUpTwice,
    SequenceModel,
    StepsEverySecondTime,
    make_batch,
)
from tests.support.parameters import slow_except
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, Batch, loss_of


class ManualModel(ClickModel):
    """Gives each batch to `recipe`, which does the rest."""

    def __init__(self, *args: Any, recipe: Callable[..., None]) -> None:
        super().__init__(*args)
        self.automatic_optimization, self.recipe = False, recipe

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        backward = self.manual_backward
        self.recipe(
            self, self.optimizers(), lambda s: backward(s * loss_of(self, batch)), batch_idx
        )


def accumulate(model: Any, optimizer: Any, backward: Any, index: int) -> None:
    """Step at every third batch, after two backward passes for each."""
    for scale in (1.0, 0.3):
        backward(scale)
    if index % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


def discard(model: Any, optimizer: Any, backward: Any, index: int) -> None:
    """Forget the gradients of a first backward, and of every third batch."""
    backward(5.0)
    optimizer.zero_grad()
    backward(1.0)
    if index % 3 == 1:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def pile_up(model: Any, optimizer: Any, backward: Any, index: int) -> None:
    """Never forget a gradient."""
    backward(0.1)
    optimizer.step()


def clip(model: Any, optimizer: Any, backward: Any, index: int, *, algorithm: str) -> None:
    """Clip the gradients by Lightning's function."""
    optimizer.zero_grad()
    backward(1.0)
    model.clip_gradients(optimizer, CLIPPING[algorithm], algorithm)
    optimizer.step()


class SkipsSteps(StepsEverySecondTime, ClickModel):
    """Forgets gradients after these steps, by the pattern in Lightning's documentation."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClipsInItsHook(ClickModel):
    """Clips by itself, without a word to the Trainer or with what the Trainer was told."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        limit = CLIPPING["norm"] if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, limit, gradient_clip_algorithm or "norm")


class ClipsByItself(ClickModel):
    """Clips by a norm of all gradients, with code of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [weight.grad for weight in self.parameters() if weight.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient *= (0.01 / norm).clamp(max=1.0)


class LooksUpTwiceForOne(ClickModel):
    """Looks up a second time for a target that needs no gradient, and asks what modules have."""

    def forward(self, batch: Batch) -> Tensor:
        assert not any(hasattr(module, "no_such_thing") for module in self.modules())
        sum(hasattr(module, "weight") for module in self.modules())
        target = super().forward(batch | {"ids": (batch["ids"] * 7 + 1) % 11}).detach()
        return super().forward(batch) + 0.1 * target


class Checkpoints(ClickModel):
    """Recomputes its lookup in backward, by either kind of checkpoint."""

    def __init__(self, *args: Any, reentrant: bool) -> None:
        super().__init__(*args)
        self.reentrant = reentrant

    def forward(self, batch: Batch) -> Tensor:
        anchor = torch.zeros(1, requires_grad=True, device=self.device)
        look_up = partial(self._look_up, batch)
        return torch.utils.checkpoint.checkpoint(look_up, anchor, use_reentrant=self.reentrant)

    def _look_up(self, batch: Batch, anchor: Tensor) -> Tensor:
        return super().forward(batch)


class WithL2(ClickModel):
    """Has the tables' own weights in its loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        squares = [weight.pow(2).sum() for weight in self.ebc.parameters()]
        return super().training_step(batch, batch_idx) + 0.05 * torch.stack(squares).sum()


class WithTerm(ClickModel):
    """Has the squares of all tables, and the norm of one, in its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        norm = sharded_l2(self.ebc.embedding_bags["wide"]).sqrt()
        loss = super().training_step(batch, batch_idx)
        return loss + 0.05 * sharded_l2(self.ebc) + 0.1 * norm


class UsesSomeRows(SequenceModel):
    """Looks all features up, and uses two of them in every second step only."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)
        names = FEATURES if batch_idx % 2 == 0 else FEATURES[:2]
        loss = torch.stack([rows[name].values().pow(2).sum() for name in names]).sum() / 8
        return loss + 0.0 * self.mlp(self.first(torch.zeros(1, 32, device=self.device))).sum()


class SumsUp(SequenceModel):
    """Has a loss that is a sum, which a batch without examples has too."""

    def __init__(self, *args: Any, divisor: float) -> None:
        super().__init__(*args)
        self.divisor = divisor

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            self(batch), batch["label"], reduction="sum"
        )
        return losses / self.divisor


def halve_gradients(trainer: Any, module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def batch_of_sizes(sizes: tuple[int, ...], step: int, rank: int) -> Batch:
    return make_batch(1000 * step + rank, sizes[rank])


def rows(text: str, cases: dict[str, Case]) -> dict[str, Case]:
    """Return cases of several optimizers under this name."""
    return {f"{text}, {name}": case for name, case in cases.items()}


CLIPPING = {"norm": 0.05, "value": 0.002}
BY_VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
LATER = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}
LARGE_ADAM = (torch.optim.Adam, {"lr": 0.1})
HALVED = {"callbacks": [LambdaCallback(on_after_backward=halve_gradients)]}
DENSE, SPARSE = {"embedding_update": "dense"}, {"embedding_update": "sparse"}
WHOLE = {"sharding_types": ["table_wise"]}
UNEQUAL = {"batch": partial(batch_of_sizes, (4, 12)), "loss_limit": None}
SPARSE_CUTS = SPARSE | {"tables": {"wide": {"sharding_types": ["row_wise"]}}}
CASES = {
    "accumulated": click_case(ClickModel, "RowWiseAdagrad", trainer={"accumulate_grad_batches": 4}),
    "accumulated later": click_case(ClickModel, steps=5, trainer=LATER),
    "accumulated by hand": click_case(ManualModel, "Adam", recipe=accumulate),
    "forgotten": click_case(ManualModel, "RowWiseAdagrad", recipe=discard),
    "never forgotten": click_case(ManualModel, recipe=pile_up),
    "steps skipped": click_case(SkipsSteps, "Adam"),
    "two lookups": click_case(LooksUpTwice),
    "two lookups, sparse": click_case(LooksUpTwice, "Adagrad", strategy=SPARSE),
    "two lookups, dense": click_case(LooksUpTwice, "RowWiseAdagrad", strategy=DENSE),
    "clipped by hand, by value": click_case(
        ManualModel, "SGD", recipe=partial(clip, algorithm="value"), strategy=EVERY_CUT
    ),
    **rows("clipped in the hook", for_each(ClipsInItsHook, ("SGD", "Adam"), strategy=EVERY_CUT)),
    "clipped by its own code": click_case(ClipsByItself, "Adam", strategy=WHOLE),
    "accumulated and clipped": click_case(
        ClickModel, LARGE_ADAM, steps=8, trainer=BY_VALUE | {"accumulate_grad_batches": 2}
    ),
    "halved by a callback": click_case(ClickModel, "Adagrad", trainer=HALVED),
    "a second lookup without gradient": click_case(LooksUpTwiceForOne, "Adagrad"),
    "checkpoint": click_case(Checkpoints, "Adagrad", reentrant=False),
    "reentrant checkpoint, unequal batches": click_case(
        *(Checkpoints, "SGD"),
        reentrant=True,
        batch=partial(batch_of_sizes, (3, 8)),
        loss_limit=None,
    ),
    "a batch of no examples": click_case(
        *(SumsUp, "SGD"),
        divisor=16.0,
        plain=partial(SumsUp, *OPTIMIZERS["SGD"], divisor=32.0),
        batch=partial(batch_of_sizes, (0, 8)),
        strategy={"loss_reduction": "rank_mean"},
    ),
    "L2, Adam": click_case(WithL2, "Adam"),
    "L2, sparse": click_case(WithL2, strategy=SPARSE),
    "L2 of shards": click_case(WithTerm),
    "L2 of shards, unequal": click_case(WithTerm, strategy=SPARSE_CUTS, **UNEQUAL),
    "L2 of shards, unequal, every cut": click_case(
        WithTerm, "Adam", strategy=EVERY_CUT, trainer={"accumulate_grad_batches": 3}, **UNEQUAL
    ),
    "L2 of shards, by rows": click_case(WithTerm, "RowWiseAdagrad"),
    "rows in no loss, row-wise": click_case(
        *(UsesSomeRows, "Adam"),
        join=None,
        strategy={"sharding_types": ["row_wise"]},
        rests=("mlp", "first"),
    ),
    "ranks without rows": click_case(ClickModel, "RowWiseAdagrad", strategy=WHOLE | DENSE),
}


SLOW = (
    "accumulated later",
    "never forgotten",
    "steps skipped",
    "two lookups",
    "two lookups, dense",
    "clipped by hand, by value",
    "clipped by its own code",
    "a second lookup without gradient",
    "checkpoint",
    "L2, sparse",
    "L2 of shards, by rows",
    "ranks without rows",
)
"""Rows whose parts others have."""


@pytest.mark.parametrize("name", slow_except(set(CASES) - {*SLOW}, CASES))
def test_gradients_make_the_update_of_one_process(name: str) -> None:
    check(CASES[name])


def test_the_term_of_a_table_that_is_updated_in_backward_is_refused_with_a_way_out() -> None:
    fused = {"embedding_update": "fused"}
    check_refused(click_case(WithTerm, "SGD", strategy=fused), "lightning_distrec.sharded_l2")
