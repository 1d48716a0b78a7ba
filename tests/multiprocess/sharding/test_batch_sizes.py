"""The same numbers whatever the number of ranks, and when ranks have batches of unequal size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from tests.support.click_model import (
    ClickModel,
    SequenceModel,
    join_batches,
    largest_difference,
    make_batch,
    seeded,
    train_sharded,
)
from tests.support.parameters import slow_except
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 1.0})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.02})
ADAM = (torch.optim.Adam, {"lr": 0.001})
STEPS, PARTS = 6, 12


class SumOfLosses(ClickModel):
    """Returns the sum over its batch, scaled so that steps stay small."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = (
            nn.functional.binary_cross_entropy_with_logits(
                self(batch), batch["label"], reduction="sum"
            )
            / 24
        )
        self.losses.append(float(loss.detach()))
        return loss


class LooksUpCandidates(ClickModel):
    """Looks up a second time with twice the examples, and so in the same proportion on all
    ranks."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        twice = join_batches([batch, batch])
        candidates = super().forward(twice).view(2, -1)
        return super().forward(batch) + 0.1 * candidates[0]


def part(step: int, i: int) -> dict[str, Tensor]:
    """One twelfth of a global batch, of two examples."""
    return make_batch(1000 * step + i, size=2)


def cut_of(num_ranks: int, unequal: bool) -> list[range]:
    """Which parts of a global batch each rank has."""
    if not unequal:
        part = PARTS // num_ranks
        return [range(rank * part, (rank + 1) * part) for rank in range(num_ranks)]
    ends = {2: [0, 3, 12], 3: [0, 1, 5, 12]}[num_ranks]
    return [range(*pair) for pair in zip(ends, ends[1:], strict=False)]


def _train(
    kind: type, optimizer: Any, unequal: bool, strategy: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    rank, num_ranks = rank_and_num_ranks()
    local = cut_of(num_ranks, unequal)[rank]
    batches = [join_batches([part(step, i) for i in local]) for step in range(STEPS)]
    model = seeded(kind, *optimizer)
    model.train_dataloader = lambda: DataLoader(batches, batch_size=None)  # type: ignore[method-assign]
    train_sharded(model, None, strategy)
    return model.final_state, model.losses


def _unsharded(kind: type, optimizer: Any) -> ClickModel:
    model = seeded(kind, *optimizer)
    stepper = model.configure_optimizers()
    for step in range(STEPS):
        stepper.zero_grad()
        model.training_step(join_batches([part(step, i) for i in range(PARTS)]), step).backward()
        stepper.step()
    return model


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_ranks"),
    slow_except(
        [
            (ClickModel, SGD, 1),
            (ClickModel, SGD, 4),
            (SequenceModel, ADAGRAD, 2),
            (ClickModel, ADAM, 3),
        ],
        [
            (*model, num_ranks)
            for model in ((ClickModel, SGD), (SequenceModel, ADAGRAD), (ClickModel, ADAM))
            for num_ranks in (1, 2, 3, 4)
        ],
    ),
)
def test_any_number_of_ranks_gives_the_same_losses_on_the_same_batches(
    kind: type, optimizer: Any, num_ranks: int
) -> None:
    actual = run_on_warm_ranks(_train, num_ranks, kind, optimizer, False, {})
    expected = _unsharded(kind, optimizer)
    losses = [
        sum(rank_results) / num_ranks
        for rank_results in zip(*(losses for _, losses in actual), strict=True)
    ]
    assert losses == pytest.approx(expected.losses, abs=1e-6)
    assert max(largest_difference(actual[0][0], expected.state_dict()).values()) <= (
        1e-6 if optimizer is SGD else 1e-5
    )


@pytest.mark.parametrize("num_ranks", slow_except([3], [2, 3]))
@pytest.mark.parametrize(
    ("kind", "optimizer", "strategy"),
    [
        (ClickModel, SGD, {}),
        (ClickModel, ADAM, {"check_ids": "ignore"}),
        (SequenceModel, ADAGRAD, {"embedding_update": "sparse"}),
        (LooksUpCandidates, SGD, {}),
        (SumOfLosses, SGD, {"loss_reduction": "sum"}),
    ],
)
def test_unequal_batches_give_the_mean_or_sum_over_the_global_batch(
    kind: type, optimizer: Any, strategy: dict[str, Any], num_ranks: int
) -> None:
    actual = run_on_warm_ranks(_train, num_ranks, kind, optimizer, True, strategy)[0][0]
    expected = _unsharded(kind, optimizer).state_dict()
    assert max(largest_difference(actual, expected).values()) <= (
        1e-6 if optimizer is SGD else 1e-5
    )


def test_rank_mean_is_the_mean_of_the_ranks_means() -> None:
    actual = run_on_warm_ranks(_train, 2, ClickModel, SGD, True, {"loss_reduction": "rank_mean"})[
        0
    ][0]
    model = seeded(ClickModel, *SGD)
    stepper = model.configure_optimizers()
    for step in range(STEPS):
        stepper.zero_grad()
        for local in cut_of(2, True):
            (model.training_step(join_batches([part(step, i) for i in local]), step) / 2).backward()
        stepper.step()
    assert max(largest_difference(actual, model.state_dict()).values()) <= 1e-6


def test_an_unknown_reduction_is_reported() -> None:
    with pytest.raises(
        ConfigError,
        match="loss_reduction='max' is not known.*Use one of 'mean', 'sum', 'rank_mean'",
    ):
        TorchRecShardedStrategy(loss_reduction="max")  # type: ignore[arg-type]
